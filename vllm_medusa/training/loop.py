"""Medusa-1 training: the target is frozen, each head learns the token it will be asked for.

Loss (Cai et al. 2024, arXiv:2401.10774, section 2.2.1): sum over heads k of 0.8^k times cross-entropy, over the draft
vocabulary; a target outside it teaches nothing (and counts as a miss when accuracy is measured).
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.training.cross_entropy import linear_cross_entropy
from vllm_medusa.training.hidden import HiddenRows


@dataclass(frozen=True)
class LoopOptions:
    """How the heads learn. `learning_rate` is the peak, after a linear warm-up, before a cosine down to zero."""

    epochs: int = 2
    batch_size: int = 1024
    learning_rate: float = 1.5e-3
    warmup_share: float = 0.05
    weight_decay: float = 0.01
    head_decay: float = 0.8
    seed: int = 0


@dataclass
class Progress:
    """Where training stands: steps done and in all, and a running mean of the loss of each head."""

    steps: int
    step: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0


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


def draft_targets(rows: HiddenRows, heads: MedusaHeads) -> npt.NDArray[np.int64]:
    """Targets of every row as indices into the draft vocabulary, int64 [n, K].

    -1: past the answer's end; -2: a token outside the draft vocabulary, which the heads cannot guess.
    """
    targets = rows.targets(heads.config.num_heads)
    place = np.full(heads.config.vocab_size, -2, dtype=np.int64)
    known = np.arange(heads.config.vocab_size) if heads.token_map is None else heads.token_map.cpu().numpy()
    place[known] = np.arange(len(known))
    return np.where(targets >= 0, place[targets], -1)


def train_heads(
    heads: MedusaHeads,
    rows: HiddenRows,
    options: LoopOptions,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Train bound float32 heads in place, with bfloat16 products, on all rows; the same seed gives the same heads.

    Args:
        heads: bound to the target whose rows these are (a bfloat16 unembedding makes the products fast).
        rows: n rows; a row's token is the root that conditions the heads.
        options: see LoopOptions.
        on_progress: told after every step.
    """
    if heads.config.unembedding != "target":
        fix = "only heads that share the target's unembedding can be trained"
        raise MedusaError.of("unembedding", heads.config.unembedding, fix)
    targets = draft_targets(rows, heads)
    useful = np.flatnonzero((targets >= 0).any(axis=1))
    if len(useful) == 0:
        raise MedusaError.of("rows", len(rows), "no answer is longer than one token; record longer answers")
    steps = options.epochs * math.ceil(len(useful) / options.batch_size)
    heads.requires_grad_(True).train()
    optimizer = torch.optim.AdamW(
        _groups(heads, rows, options), lr=options.learning_rate, betas=(0.9, 0.99), fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _warm_cosine(steps, options.warmup_share))
    decay = torch.tensor([options.head_decay**head for head in range(heads.config.num_heads)])
    progress, began = Progress(steps), time.monotonic()
    for epoch in range(options.epochs):
        order = np.random.default_rng([options.seed, epoch]).permutation(useful)
        for first in range(0, len(order), options.batch_size):
            chosen = np.sort(order[first : first + options.batch_size])  # in order: kinder to the disk
            losses = _step(heads, rows, chosen, torch.from_numpy(targets[chosen]), decay)
            torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            progress.step += 1
            progress.seconds = time.monotonic() - began
            seen = progress.losses or losses
            progress.losses = [0.95 * old + 0.05 * new for old, new in zip(seen, losses, strict=True)]
            on_progress(progress)
    heads.requires_grad_(False).eval()
    return progress


def _step(
    heads: MedusaHeads, rows: HiddenRows, chosen: npt.NDArray[np.int64], targets: Tensor, decay: Tensor
) -> list[float]:
    """Forward and backward of one batch; returns the mean loss of each head."""
    weight = heads.unembedding_weight()[0]
    hidden = rows.gather(chosen).to(weight.device)
    roots = torch.from_numpy(rows.tokens[chosen].astype(np.int64)).to(weight.device)
    with torch.autocast(weight.device.type, dtype=torch.bfloat16):
        states = heads.states(hidden, roots)
    losses: list[Tensor] = []
    for head in range(targets.shape[1]):
        valid = (targets[:, head] >= 0).nonzero().flatten()
        each = torch.full((len(valid),), 1.0 / max(len(valid), 1))
        goal = targets[valid, head].to(weight.device)
        losses.append(linear_cross_entropy(states[valid.to(weight.device), head], weight, goal, each.to(weight.device)))
    torch.stack(losses).mul(decay.to(weight.device)).sum().backward()
    return [float(loss.detach()) for loss in losses]


def _groups(heads: MedusaHeads, rows: HiddenRows, options: LoopOptions) -> list[dict]:
    """Weights decay, biases do not, and the root's weights step further where embeddings are smaller than rows.

    Adam moves every weight by about the learning rate, so a product's output moves with the size of its input; the
    ratio of the two sizes lets both inputs of a root-conditioned block count alike from the start.
    """
    matrices = [block.weight for block in heads.layers]
    biases = [block.bias for block in heads.layers if block.bias is not None]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": biases, "weight_decay": 0.0},
    ]
    if heads.root is not None:
        sample = np.linspace(0, len(rows) - 1, num=min(len(rows), 512), dtype=np.int64)
        ratio = float(rows.gather(sample).float().square().mean().sqrt() / heads.embedding_rms())
        rate = options.learning_rate * min(max(ratio, 1.0), 10.0)
        groups.append({"params": [heads.root], "weight_decay": options.weight_decay, "lr": rate})
    return groups


def _warm_cosine(steps: int, warmup_share: float) -> Callable[[int], float]:
    warmup = max(1, round(steps * warmup_share))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    return factor
