"""What the target said itself at a few recorded rows, by vLLM's own layers: what our reading of its head is held to."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.target import Target

FILE = "said.pt"
TOP = 16
# Mean total variation beyond which two distributions are not the same in other roundings. In bfloat16 these differ by
# less than 0.02; a scale of the logits that is forgotten costs 0.6.
MOST = 0.06


@dataclass(frozen=True)
class Said:
    """The target's distribution at n rows, its likeliest tokens only.

    Attributes:
        rows: bfloat16 [n, H].
        tokens: int64 [n, S].
        probabilities: float32 [n, S], among all tokens of the target.
    """

    rows: Tensor
    tokens: Tensor
    probabilities: Tensor

    @classmethod
    def of(cls, rows: Tensor, logits: Tensor) -> Said:
        """From rows [n, H] and their logits [n, V]; a copy on the CPU."""
        best = logits.float().softmax(-1).topk(min(TOP, logits.shape[-1]))
        return cls(rows.cpu().clone(), best.indices.cpu(), best.values.cpu())

    def save(self, folder: Path) -> None:
        """Into a store."""
        torch.save(asdict(self), folder / FILE)

    @classmethod
    def read(cls, folder: Path) -> Said | None:
        """From a store; None: it was recorded by an earlier version."""
        if not (folder / FILE).is_file():
            return None
        return cls(**torch.load(folder / FILE, map_location="cpu", weights_only=True))

    def distance(self, target: Target) -> float:
        """Mean total variation, 0 to 1, between what the target said and what `target` makes of the same rows."""
        ours = target.logits(self.rows.to(target.unembedding.device)).softmax(-1).cpu()
        there = ours.gather(1, self.tokens)
        # What is not among the likeliest tokens counts as one.
        rest = (self.probabilities.sum(1) - there.sum(1)).abs()
        return float(((self.probabilities - there).abs().sum(1) + rest).mean() / 2)


def check_target(target: Target, folder: Path, model: str | None) -> None:
    """Hold a target's head, as it is read from its files, to what the target said itself, where the store tells.

    Args:
        target: as read.
        folder: a finished store of it.
        model: its name, for the message.

    Raises:
        MedusaError: they differ, so heads would learn from another model's distributions.
    """
    said = Said.read(folder)
    distance = said.distance(target) if said is not None else 0.0
    if not distance <= MOST:
        reason = (
            f"vLLM's logits are not those of its lm_head as it lies ({target.rule}): total variation {distance:.2f}. "
            "Heads can learn from the answers' tokens alone: --loss ce"
        )
        raise MedusaError.of("model", model, reason)
