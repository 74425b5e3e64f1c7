"""One step of training: losses of a batch, gradients of all processes, an update; and all that a snapshot must hold."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.training.cross_entropy import linear_cross_entropy
from vllm_medusa.training.hidden import HiddenRows, Rows
from vllm_medusa.training.lessons import Lesson, Lessons, Loss
from vllm_medusa.training.ranks import Ranks
from vllm_medusa.training.snapshot import Snapshots

_RELEASE = 256  # rows after which mapped pages are given back: a read row brings up to 64 KB around it


@dataclass(frozen=True)
class LoopOptions:
    """How the heads learn. `learning_rate` is the peak, after a linear warm-up, before a cosine down to zero.

    `batch_size` is that of all processes together, each of which computes its share in `accumulate` pieces.
    """

    epochs: int = 2
    batch_size: int = 256
    learning_rate: float = 1.5e-3
    warmup_share: float = 0.05
    weight_decay: float = 0.01
    head_decay: float = 0.8
    loss: Loss = "mixed"
    seed: int = 0
    accumulate: int = 1


@dataclass
class Progress:
    """Where training stands: steps done and in all, and a running mean of the loss of each head."""

    steps: int
    step: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0


class Run:
    """One training run between two steps: all that a snapshot must hold, and how a step changes it."""

    def __init__(
        self,
        heads: MedusaHeads,
        rows: HiddenRows,
        lessons: Lessons,
        options: LoopOptions,
        steps_per_epoch: int,
        ranks: Ranks,
    ) -> None:
        self.heads, self.rows, self.lessons, self.steps_per_epoch = heads, rows, lessons, steps_per_epoch
        self.ranks, self.accumulate = ranks, options.accumulate
        self.progress = Progress(options.epochs * steps_per_epoch)
        self.release_every = max(_RELEASE // options.batch_size, 1)
        self.device = heads.unembedding_weight().device
        self.decay = torch.tensor([options.head_decay**head for head in range(heads.config.num_heads)]).to(self.device)
        # All gradients in one piece of memory, added up over the processes in one go: always in the same order.
        self.gradients = _joined(heads) if ranks.count > 1 else None
        self.optimizer = torch.optim.AdamW(
            _groups(heads, rows, options), lr=options.learning_rate, betas=(0.9, 0.99), fused=True
        )
        factor = _warm_cosine(self.progress.steps, options.warmup_share)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)

    def step(self, chosen: Rows) -> None:
        """Learn from the rows `chosen`, of which each process takes its share."""
        began = time.monotonic()
        found = self._backward(chosen)
        torch.nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        if self.gradients is None:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            self.gradients.zero_()
        now = self.progress
        now.step += 1
        now.seconds += time.monotonic() - began
        means = found.tolist()
        now.losses = [0.95 * old + 0.05 * new for old, new in zip(now.losses or means, means, strict=True)]
        if now.step % self.release_every == 0:
            self.rows.release()
            if self.lessons.teacher is not None:
                self.lessons.teacher.release()

    def _backward(self, chosen: Rows) -> Tensor:
        """Gradients of the whole batch, in each process; returns the mean loss of each head [K]."""
        total = torch.zeros_like(self.decay)
        for piece in np.array_split(self.ranks.share(chosen), self.accumulate):
            losses = self._losses(*self._inputs(piece, chosen))
            losses.mul(self.decay).sum().backward()
            total += losses.detach()
        if self.gradients is not None:
            self.ranks.total(self.gradients)
        return self.ranks.total(total)

    def _inputs(self, piece: Rows, batch: Rows) -> tuple[Tensor, Tensor, list[Lesson]]:
        hidden = self.rows.gather(piece).to(self.device)
        roots = torch.from_numpy(self.rows.tokens[piece].astype(np.int64)).to(self.device)
        return hidden, roots, [self.lessons.of(piece, head, batch) for head in range(self.heads.config.num_heads)]

    def _losses(self, hidden: Tensor, roots: Tensor, lessons: Sequence[Lesson]) -> Tensor:
        """Loss of each head [K], from rows [B, H], their tokens int64 [B] and what each head learns."""
        heads, own = self.heads, self.heads.unembedding
        # [Vd, H] for all heads, or for each; float32 where it is learnt.
        matrices = (heads.unembedding_weight() if own is None else own).unbind()
        dtype = matrices[0].dtype if own is None else torch.bfloat16
        with torch.autocast(hidden.device.type, dtype=torch.bfloat16):
            states = heads.states(hidden, roots)
            if heads.config.logit_scale != 1.0:  # of the logits, which are linear in these
                states = states * heads.config.logit_scale
        losses = []
        for head, lesson in enumerate(lessons):
            matrix = matrices[head if len(matrices) > 1 else 0]
            part = (lesson.targets, lesson.shares, lesson.weights)
            targets, shares, weights = (values.to(hidden.device) for values in part)
            losses.append(linear_cross_entropy(states[:, head], matrix, targets, shares, weights, dtype))
        return torch.stack(losses)

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on; batches follow from the seed and the step."""
        return {
            "heads": self.heads.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "progress": asdict(self.progress),
            "processes": self.ranks.count,
        }

    def restore(self, snapshots: Snapshots | None, tell: Callable[[str], None]) -> None:
        """Go on from where `snapshots` stands, if it stands anywhere."""
        state = snapshots.read() if snapshots is not None else None
        if state is None:
            return
        before, now = state.get("processes", 1), self.ranks.count
        if before != now:
            processes = "process" if before == 1 else "processes"
            tell(
                f"this run was begun by {before} {processes} and goes on with {now}: the same batches, gradients added "
                "up in another order, so the heads differ in their last bits from those of as many processes throughout"
            )
        self.heads.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.progress = Progress(**state["progress"])


def _joined(heads: MedusaHeads) -> Tensor:
    """Memory for the gradients of all weights, [n], of which each weight's gradient is a part from now on."""
    weights = list(heads.parameters())
    joined = torch.zeros(sum(weight.numel() for weight in weights), device=weights[0].device)
    first = 0
    for weight in weights:
        weight.grad = joined[first : first + weight.numel()].view_as(weight)
        first += weight.numel()
    return joined


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
