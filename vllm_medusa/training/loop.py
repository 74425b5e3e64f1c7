"""Medusa-1 training: the target is frozen, each head learns the token it will be asked for.

Loss (Cai et al. 2024, arXiv:2401.10774, section 2.2.1): sum over heads k of 0.8^k times cross-entropy, over the draft
vocabulary, against the token that came or the target's distribution there (lessons.py). A token outside the draft
vocabulary teaches nothing (and counts as a miss when accuracy is measured).
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.training.cross_entropy import linear_cross_entropy
from vllm_medusa.training.hidden import HiddenRows, Rows
from vllm_medusa.training.lessons import Lessons, Loss
from vllm_medusa.training.snapshot import Snapshots
from vllm_medusa.training.teacher import Teacher

_RELEASE = 256  # rows after which mapped pages are given back: a read row brings up to 64 KB around it


@dataclass(frozen=True)
class LoopOptions:
    """How the heads learn. `learning_rate` is the peak, after a linear warm-up, before a cosine down to zero."""

    epochs: int = 2
    batch_size: int = 256
    learning_rate: float = 1.5e-3
    warmup_share: float = 0.05
    weight_decay: float = 0.01
    head_decay: float = 0.8
    loss: Loss = "mixed"
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
    """
    if options.loss != "ce" and teacher is None:
        raise ValueError(f"loss {options.loss!r} needs a teacher")
    lessons = Lessons(draft_targets(rows, heads), options.loss, None if options.loss == "ce" else teacher)
    useful = lessons.useful()
    if len(useful) == 0:
        raise MedusaError.of("rows", len(rows), "no answer is longer than one token; record longer answers")
    run = _Run(heads, rows, lessons, options, math.ceil(len(useful) / options.batch_size))
    run.restore(snapshots)
    heads.requires_grad_(True).train()
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


class _Run:
    """One training run between two steps: all that a snapshot must hold, and how a step changes it."""

    def __init__(
        self, heads: MedusaHeads, rows: HiddenRows, lessons: Lessons, options: LoopOptions, steps_per_epoch: int
    ) -> None:
        self.heads, self.rows, self.lessons, self.steps_per_epoch = heads, rows, lessons, steps_per_epoch
        self.progress = Progress(options.epochs * steps_per_epoch)
        self.release_every = max(_RELEASE // options.batch_size, 1)
        device = heads.unembedding_weight().device
        self.decay = torch.tensor([options.head_decay**head for head in range(heads.config.num_heads)]).to(device)
        self.optimizer = torch.optim.AdamW(
            _groups(heads, rows, options), lr=options.learning_rate, betas=(0.9, 0.99), fused=True
        )
        factor = _warm_cosine(self.progress.steps, options.warmup_share)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)

    def step(self, chosen: Rows) -> None:
        """Learn from the rows `chosen`."""
        began = time.monotonic()
        losses = self._losses(chosen)
        torch.stack(losses).mul(self.decay).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        now = self.progress
        now.step += 1
        now.seconds += time.monotonic() - began
        means = [float(loss.detach()) for loss in losses]
        now.losses = [0.95 * old + 0.05 * new for old, new in zip(now.losses or means, means, strict=True)]
        if now.step % self.release_every == 0:
            self.rows.release()
            if self.lessons.teacher is not None:
                self.lessons.teacher.release()

    def _losses(self, chosen: Rows) -> list[Tensor]:
        """Mean loss of each head."""
        heads, own = self.heads, self.heads.unembedding
        # [Vd, H] for all heads, or for each; float32 where it is learnt.
        matrices = (heads.unembedding_weight() if own is None else own).unbind()
        device = matrices[0].device
        dtype = matrices[0].dtype if own is None else torch.bfloat16
        hidden = self.rows.gather(chosen).to(device)
        roots = torch.from_numpy(self.rows.tokens[chosen].astype(np.int64)).to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            states = heads.states(hidden, roots)
            if heads.config.logit_scale != 1.0:  # of the logits, which are linear in these
                states = states * heads.config.logit_scale
        losses = []
        for head in range(states.shape[1]):
            lesson = self.lessons.of(chosen, head)
            targets, shares, weights = lesson.targets.to(device), lesson.shares.to(device), lesson.weights.to(device)
            matrix = matrices[head if len(matrices) > 1 else 0]
            losses.append(linear_cross_entropy(states[:, head], matrix, targets, shares, weights, dtype))
        return losses

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on; batches follow from the seed and the step."""
        return {
            "heads": self.heads.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "progress": asdict(self.progress),
        }

    def restore(self, snapshots: Snapshots | None) -> None:
        """Go on from where `snapshots` stands, if it stands anywhere."""
        state = snapshots.read() if snapshots is not None else None
        if state is None:
            return
        self.heads.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.progress = Progress(**state["progress"])


def _groups(heads: MedusaHeads, rows: HiddenRows, options: LoopOptions) -> list[dict]:
    """Weights decay, biases do not, and the root's weights step further where embeddings are smaller than rows.

    Adam moves every weight by about the learning rate, so a product's output moves with the size of its input; the
    ratio of the two sizes lets both inputs of root-conditioned heads count alike from the start. An unembedding of the
    heads' own begins as the target's, so it does not decay towards zero.
    """
    named = dict(heads.named_parameters())
    root, unembedding = named.pop("root", None), named.pop("unembedding", None)
    groups = [
        {"params": [p for name, p in named.items() if "bias" not in name], "weight_decay": options.weight_decay},
        {"params": [p for name, p in named.items() if "bias" in name], "weight_decay": 0.0},
    ]
    if root is not None:
        rate = options.learning_rate * root_ratio(heads, rows)
        groups.append({"params": [root], "weight_decay": options.weight_decay, "lr": rate})
    if unembedding is not None:
        groups.append({"params": [unembedding], "weight_decay": 0.0})
    return groups


def root_ratio(heads: MedusaHeads, rows: HiddenRows) -> float:
    """How much larger the entries of hidden rows are than those of embeddings, 1 to 10."""
    return min(max(_rms(rows) / heads.embedding_rms(), 1.0), 10.0)


def start_trunk(heads: MedusaHeads, rows: HiddenRows, seed: int) -> None:
    """Random first weights for a trunk, whose features would all be the same otherwise; the rest stays at zero.

    Rows and embeddings each bring a normal share of about 0.5 to a feature before its SiLU.
    """
    if heads.trunk is None or heads.root is None:
        return
    generator = torch.Generator().manual_seed(seed)
    size = 0.5 / math.sqrt(heads.config.hidden_size)
    for weight, rms in ((heads.trunk.weight, _rms(rows)), (heads.root, heads.embedding_rms())):
        drawn = torch.randn(weight.shape, generator=generator) * (size / max(rms, 1e-6))
        weight.data.copy_(drawn)


def _rms(rows: HiddenRows) -> float:
    """Root mean square of hidden rows' entries, from 512 rows spread over all."""
    sample = np.linspace(0, len(rows) - 1, num=min(len(rows), 512), dtype=np.int64)
    return float(rows.gather(sample).float().square().mean().sqrt())


def _warm_cosine(steps: int, warmup_share: float) -> Callable[[int], float]:
    warmup = max(1, round(steps * warmup_share))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    return factor
