"""Figures of decode steps, as they travel from the worker through the engine core to the front end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

FIGURES = "medusa_figures"  # on a ModelRunnerOutput: what the step brought
SEND_SECONDS = 0.25  # between two reports of an engine to its front end
RECENT = 40  # reports that "recent" figures look back on: ten seconds of decoding, or more
STAGES = ("forward", "walk", "commit", "propose")  # of a step, in their order; the host's own work lies between
OURS = ("walk", "commit", "propose")  # those that plain decoding does not have


@dataclass
class Counts:
    """Figures that add up: of one step, of a few, of all.

    "By batch size" counts a step of n decoding requests under the smallest power of two that is not below n. "By
    rank" is by place among a head's candidates; at place `candidates` are tokens that only the request's own text
    expected.

    Attributes:
        steps: engine steps in which requests decoded, by batch size.
        request_steps: the same, counted once per request.
        drafted_nodes: tree nodes checked, by batch size.
        emitted_tokens: tokens that the requests got; none behind the end of a request.
        accepted_by_depth: accepted nodes whose token was emitted, at depth 1, 2, ...
        drafted_by_rank: nodes checked, at rank 0, 1, ...
        accepted_by_rank: accepted ones of them whose token was emitted; on Model Runner V2 all accepted ones.
        candidates: R, candidates of each head.
        seconds: by stage (STAGES), and of the whole "step"; only of steps in which no prompt is computed.
    """

    steps: dict[int, int] = field(default_factory=dict)
    request_steps: dict[int, int] = field(default_factory=dict)
    drafted_nodes: dict[int, int] = field(default_factory=dict)
    emitted_tokens: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    drafted_by_rank: list[int] = field(default_factory=list)
    accepted_by_rank: list[int] = field(default_factory=list)
    candidates: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, other: Counts) -> None:
        """Count what `other` has counted, too.

        >>> counts = Counts(steps={1: 2}, accepted_by_depth=[3])
        >>> counts.add(Counts(steps={1: 1, 4: 1}, accepted_by_depth=[1, 1], emitted_tokens=5))
        >>> counts.steps, counts.accepted_by_depth, counts.emitted_tokens
        ({1: 3, 4: 1}, [4, 1], 5)
        """
        self.emitted_tokens += other.emitted_tokens
        self.candidates = max(self.candidates, other.candidates)
        _add_table(self.steps, other.steps)
        _add_table(self.request_steps, other.request_steps)
        _add_table(self.drafted_nodes, other.drafted_nodes)
        _add_table(self.seconds, other.seconds)
        _add_list(self.accepted_by_depth, other.accepted_by_depth)
        _add_list(self.drafted_by_rank, other.drafted_by_rank)
        _add_list(self.accepted_by_rank, other.accepted_by_rank)

    def take_off(self, other: Counts) -> Counts:
        """Take out steps, request steps, tokens and accepted nodes that `other` has counted wrongly.

        Returns:
            What of it could not be taken off yet: no count falls below 0.

        >>> counts = Counts(request_steps={2: 3}, accepted_by_depth=[3, 1], emitted_tokens=7)
        >>> left = counts.take_off(Counts(request_steps={2: 1, 4: 1}, accepted_by_depth=[1, 2], emitted_tokens=4))
        >>> counts.request_steps, counts.accepted_by_depth, counts.emitted_tokens
        ({2: 2}, [2, 0], 3)
        >>> left.request_steps, left.accepted_by_depth, left.emitted_tokens
        ({4: 1}, [0, 1], 0)
        """
        most = min(self.emitted_tokens, other.emitted_tokens)
        self.emitted_tokens -= most
        left = Counts(emitted_tokens=other.emitted_tokens - most)
        left.steps = _take_off_table(self.steps, other.steps)
        left.request_steps = _take_off_table(self.request_steps, other.request_steps)
        for depth, value in enumerate(other.accepted_by_depth):
            most = min(value, self.accepted_by_depth[depth]) if depth < len(self.accepted_by_depth) else 0
            if most:
                self.accepted_by_depth[depth] -= most
            left.accepted_by_depth.append(value - most)
        return left

    @property
    def num_request_steps(self) -> int:
        """Request steps at all batch sizes."""
        return sum(self.request_steps.values())

    @property
    def num_drafted(self) -> int:
        """Nodes checked at all batch sizes."""
        return sum(self.drafted_nodes.values())

    @property
    def num_accepted(self) -> int:
        """Nodes accepted and emitted at all depths."""
        return sum(self.accepted_by_depth)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted per request and step, the bonus token counted; 0 before the first step."""
        return self.emitted_tokens / self.num_request_steps if self.request_steps else 0.0

    @property
    def overhead_share(self) -> float:
        """Share of the steps' time that plain decoding would not have spent outside its forward pass."""
        step = self.seconds.get("step", 0.0)
        return sum(self.seconds.get(stage, 0.0) for stage in OURS) / step if step else 0.0


@dataclass
class Learnt:
    """What the engine has learnt about costs and drafts so far.

    Attributes:
        trust: accepted nodes over the sum of the probabilities that drafts promised.
        step_seconds: of a step by its tokens, without the heads.
        heads_seconds: of asking the heads, by requests.
    """

    trust: float = 1.0
    step_seconds: dict[int, float] = field(default_factory=dict)
    heads_seconds: dict[int, float] = field(default_factory=dict)


@dataclass
class Figures:
    """One report: what is new since the last one.

    Attributes:
        counts: of the steps since then.
        learnt: as it is now; None: nothing newer than in the last report.
        mean_accepted_length, overhead_share: over the last RECENT reports; None on the way to the engine core.
    """

    counts: Counts = field(default_factory=Counts)
    learnt: Learnt | None = None
    mean_accepted_length: float | None = None
    overhead_share: float | None = None


class Outbox:
    """Gathers the figures of an engine's steps, and gives them away a few times a second.

    What is given away is not kept: each report goes to one front end, and all front ends' counters add up.
    """

    def __init__(self) -> None:
        """Nothing gathered."""
        self._gathered: Figures | None = None
        self._recent: deque[Counts] = deque(maxlen=RECENT)
        self._due = 0.0

    def put(self, figures: Figures) -> None:
        """Gather one step's figures."""
        if self._gathered is None:
            self._gathered = Figures()
        self._gathered.counts.add(figures.counts)
        self._gathered.learnt = figures.learnt or self._gathered.learnt

    def take(self, now: float, *, idle: bool) -> Figures | None:
        """What has been gathered, if there is anything, and it is time for it or the engine has nothing left to do.

        Args:
            now: seconds, on any clock.
            idle: no request is left.
        """
        report = self._gathered
        if report is None or (now < self._due and not idle):
            return None
        self._gathered, self._due = None, now + SEND_SECONDS
        self._recent.append(report.counts)
        recent = Counts()
        for counts in self._recent:
            recent.add(counts)
        report.mean_accepted_length = recent.mean_accepted_length
        report.overhead_share = recent.overhead_share
        return report


def batch_label(requests: int) -> int:
    """The smallest power of two that is not below `requests`.

    >>> [batch_label(n) for n in (1, 2, 3, 4, 5, 32, 33)]
    [1, 2, 4, 4, 8, 32, 64]
    """
    return 1 << (requests - 1).bit_length()


def _add_table(totals: dict, values: dict) -> None:
    for key, value in values.items():
        totals[key] = totals.get(key, 0) + value


def _take_off_table(totals: dict[int, int], values: dict[int, int]) -> dict[int, int]:
    left = {}
    for key, value in values.items():
        has = totals.pop(key, 0)
        if has > value:
            totals[key] = has - value
        elif has < value:
            left[key] = value - has
    return left


def _add_list(totals: list[int], values: list[int]) -> None:
    totals += [0] * (len(values) - len(totals))
    for place, value in enumerate(values):
        totals[place] += value
