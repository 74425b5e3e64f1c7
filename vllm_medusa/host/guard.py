"""A look at whether the heads fit the target at all: once, after the first thousand drafted steps."""

from __future__ import annotations

import logging

WATCHED_STEPS = 1000
NEAR_ZERO = 0.02  # the weakest heads that we trained are right five times as often at temperature 1


class AcceptanceGuard:
    """Counts how often the first head is right, and warns loudly if it practically never is."""

    def __init__(self, heads: str, logger: logging.Logger) -> None:
        """Watch the heads in the folder `heads`."""
        self.heads = heads
        self.logger = logger
        self.drafted = 0
        self.accepted = 0
        self.judged = False

    def watch(self, drafted: int, accepted: int) -> None:
        """Add one step of the engine.

        Args:
            drafted: requests that had a draft.
            accepted: those of them that accepted a node.
        """
        if self.judged:
            return
        self.drafted += drafted
        self.accepted += accepted
        if self.drafted < WATCHED_STEPS:
            return
        self.judged = True
        share = self.accepted / self.drafted
        if share < NEAR_ZERO:
            self.logger.warning(
                "Medusa: of the first %d drafted steps only %.1f %% accepted a guess. Answers are right all the same, "
                "but speculation only costs time. Likely causes: heads that were trained for another model or another "
                "fine-tune of it; heads trained on hidden rows from before the final norm; a checkpoint whose layout "
                "was misread. Look at: vllm-medusa inspect %s; vllm-medusa calibrate --heads %s",
                self.drafted,
                100 * share,
                self.heads,
                self.heads,
            )
