"""What each head is to learn from each row: the token that came, what the target thought of it, or a mix of both."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_medusa.training.hidden import Rows
from vllm_medusa.training.teacher import Teacher

Loss = Literal["ce", "kl", "mixed"]


@dataclass(frozen=True)
class Lesson:
    """What one head learns from the B rows of a batch.

    Attributes:
        targets: int64 [B, S], tokens by their index in the draft vocabulary.
        shares: float32 [B, S], how much of the row's loss each counts; all 0 where the head learns nothing.
        weights: float32 [B], so that the batch's loss is a mean over the rows from which it learns something.
    """

    targets: Tensor
    shares: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Lessons:
    """Lessons for n rows and K heads.

    Attributes:
        targets: int32 [n, K], see `loop.draft_targets`.
        loss: "ce" the token that came; "kl" the target's distribution at the row that produced it; "mixed" half each.
        teacher: the target's distributions at these rows; None only for "ce".
    """

    targets: npt.NDArray[np.int32]
    loss: Loss = "ce"
    teacher: Teacher | None = None

    def useful(self) -> npt.NDArray[np.int32]:
        """Rows from which at least one head learns something."""
        return np.flatnonzero(self._known(self.targets).any(axis=1)).astype(np.int32)

    def of(self, rows: Rows, head: int, batch: Rows | None = None) -> Lesson:
        """What `head` (from 0) learns from `rows`, in a batch whose shape does not depend on how many teach it.

        Args:
            rows: of a batch, or of the part of it that is computed here.
            head: from 0.
            batch: the whole of it, over which the loss is a mean; None: `rows`.
        """
        said = self.targets[rows, head]
        known, inside = self._known(said), (said >= 0)[:, None].astype(np.float32)
        targets, shares = np.maximum(said, 0)[:, None], inside
        if self.teacher is not None:
            # The row that produced the token this head guesses; past an answer's end any row, at no weight.
            producers = np.where(known, rows + head + 1, 0)
            guesses, likely = self.teacher.tokens[producers], self.teacher.shares[producers].astype(np.float32)
            # A token outside the draft vocabulary cannot be taught: then the distribution stands alone.
            one = inside * np.float32(0.5 if self.loss == "mixed" else 0.0)
            targets = np.concatenate([guesses, targets], axis=1)
            shares = np.concatenate([likely * (1.0 - one), one], axis=1) * known[:, None]
        teaching = known if batch is None else self._known(self.targets[batch, head])
        weights = known.astype(np.float32) / max(int(teaching.sum()), 1)
        return Lesson(torch.from_numpy(targets.astype(np.int64)), torch.from_numpy(shares), torch.from_numpy(weights))

    def _known(self, targets: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Whether there is a lesson: a distribution exists wherever an answer goes on, a token only inside the map."""
        return targets >= 0 if self.teacher is None else targets != -1
