"""Medusa-1 training: the target is frozen, each head learns the token it will be asked for.

Loss (Cai et al. 2024, arXiv:2401.10774, section 2.2.1): sum over heads k of 0.8^k times cross-entropy, over the draft
vocabulary, against the token that came or the target's distribution there (lessons.py). A token outside the draft
vocabulary teaches nothing (and counts as a miss when accuracy is measured).
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.training.hidden import HiddenRows
from vllm_medusa.training.lessons import Lessons
from vllm_medusa.training.ranks import Ranks
from vllm_medusa.training.snapshot import Snapshots
from vllm_medusa.training.step import LoopOptions, Progress, Run
from vllm_medusa.training.teacher import Teacher


def choose_draft_vocab(tokens: npt.NDArray[np.int32], size: int, vocab_size: int) -> Tensor:
    """The `size` tokens that the target says most, int64 [size], ascending; rest filled with the lowest ids.

    Byte-pair vocabularies number their merges by frequency, so low ids are the best guess for tokens never seen.

    >>> choose_draft_vocab(np.array([7, 7, 5], dtype=np.int32), 3, 9).tolist()
    [0, 5, 7]
    """
    if not 1 <= size <= vocab_size:
        raise MedusaError.of("draft_vocab_size", size, f"choose 1 to the target's vocabulary, {vocab_size}")
    counts = np.bincount(tokens, minlength=vocab_size)[:vocab_size]
    order = np.lexsort((np.arange(vocab_size), -counts))
    return torch.from_numpy(np.sort(order[:size]).astype(np.int64))


def draft_targets(rows: HiddenRows, heads: MedusaHeads) -> npt.NDArray[np.int32]:
    """Targets of every row as indices into the draft vocabulary, int32 [n, K].

    -1: past the answer's end; -2: a token outside the draft vocabulary, which the heads cannot guess.
    """
    targets = rows.targets(heads.config.num_heads)
    size = max(heads.config.vocab_size, int(rows.tokens.max(initial=0)) + 1)  # targets may have learnt new tokens
    place = np.full(size + 1, -2, dtype=np.int32)
    known = np.arange(heads.config.vocab_size) if heads.token_map is None else heads.token_map.cpu().numpy()
    place[known] = np.arange(len(known))
    place[-1] = -1  # what stands past an answer's end stays as it is
    for head in range(targets.shape[1]):  # in place and one by one: there may be millions
        targets[:, head] = place[targets[:, head]]
    return targets


def train_heads(
    heads: MedusaHeads,
    rows: HiddenRows,
    options: LoopOptions,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    *,
    teacher: Teacher | None = None,
    snapshots: Snapshots | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
    tell: Callable[[str], None] = lambda words: None,
) -> Progress:
    """Train bound float32 heads in place, with bfloat16 products, on all rows; the same seed gives the same heads.

    An unembedding that the heads bring themselves is learnt with them; the target's stays as it is.

    Args:
        heads: bound to the target whose rows these are (a bfloat16 unembedding makes the products fast).
        rows: n rows; a row's token is the root that conditions the heads.
        options: see LoopOptions.
        on_progress: told after every step.
        teacher: the target's own distributions at these rows, for every loss but "ce".
        snapshots: where the run's state is kept, and gone on from if it is there: the result is that of an unbroken
            run, bit for bit. The caller names the file after everything that decides the result (`run_name`).
        ranks: the processes that train together; all of them call this, with the same arguments. The heads are those of
            one process but for the order in which gradients are added up. The first one keeps snapshots.
        tell: what people should know: that a run goes on with another number of processes.
    """
    if options.loss != "ce" and teacher is None:
        raise ValueError(f"loss {options.loss!r} needs a teacher")
    lessons = Lessons(draft_targets(rows, heads), options.loss, None if options.loss == "ce" else teacher)
    useful = lessons.useful()
    if len(useful) == 0:
        raise MedusaError.of("rows", len(rows), "no answer is longer than one token; record longer answers")
    heads.requires_grad_(True).train()
    run = Run(heads, rows, lessons, options, math.ceil(len(useful) / options.batch_size), ranks)
    run.restore(snapshots, tell)
    if not ranks.is_first:
        snapshots = None
    first_epoch, done = divmod(run.progress.step, run.steps_per_epoch)
    for epoch in range(first_epoch, options.epochs):
        order = np.random.default_rng([options.seed, epoch]).permutation(useful)
        for first in range(done * options.batch_size, len(order), options.batch_size):
            run.step(np.sort(order[first : first + options.batch_size]))  # in order: kinder to the disk
            if snapshots is not None and (snapshots.due() or run.progress.step == run.progress.steps):
                snapshots.keep(run.state())
            on_progress(run.progress)
        done = 0
    heads.requires_grad_(False).eval()
    return run.progress
