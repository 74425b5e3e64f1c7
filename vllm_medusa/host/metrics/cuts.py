"""What the engine core drops of a walk: on Model Runner V2 only it knows where requests end, and tells the worker."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from vllm_medusa.host.metrics.figures import Counts

CUTS = "medusa_cuts"  # on a SchedulerOutput: its number, and the cuts that were found since the plan before
REMEMBERED = 64  # steps; a cut is told two plans after its step was planned


class Cut(NamedTuple):
    """A walk of which a request got less than was walked.

    Attributes:
        step: number of the plan.
        request: name.
        walked: tokens that the walk brought, the bonus token included.
        got: tokens that the request got; 0: it had ended before this step, or its step was computed for nothing.
    """

    step: int
    request: str
    walked: int
    got: int


class CountedSteps:
    """Remembers in which steps each request was counted as decoding, so that a cut takes out what was counted, no more.

    Attributes:
        now: number of the step that is being run; None: of none.
    """

    def __init__(self) -> None:
        """No step yet."""
        self.now: int | None = None
        self._steps: OrderedDict[int, tuple[int, set[str]]] = OrderedDict()
        self._since = 0

    def note(self, label: int, decoding: Iterable[str]) -> None:
        """The step that is being run was counted under `label`, with these requests."""
        if self.now is None:
            return
        self._steps[self.now] = (label, set(decoding))
        while len(self._steps) > REMEMBERED:
            self._steps.popitem(last=False)

    def start_anew(self) -> None:
        """Totals begin at 0 with the next step."""
        self._since = max(self._steps, default=self._since)

    def wrong(self, cuts: Sequence[Cut]) -> tuple[Counts, Counts]:
        """What was counted too much by these cuts: in all, and since `start_anew`."""
        ever, since = Counts(), Counts()
        for cut in cuts:
            label, decoding = self._steps.get(cut.step, (0, set()))
            if cut.request not in decoding:
                continue
            depths = range(1, cut.walked)
            wrong = Counts(
                emitted_tokens=cut.walked - cut.got, accepted_by_depth=[int(depth > cut.got) for depth in depths]
            )
            if cut.got == 0:  # no request step either
                decoding.remove(cut.request)
                wrong.request_steps = {label: 1}
                wrong.steps = {} if decoding else {label: 1}
            ever.add(wrong)
            if cut.step > self._since:
                since.add(wrong)
        return ever, since
