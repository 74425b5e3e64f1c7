"""What a schedule's run ended in: something that must never happen, totals, a request under way."""

from __future__ import annotations

from dataclasses import dataclass, field

from schedules import Ask


class Violation(Exception):
    """Something that must never happen did; `kind` is one word or two."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


@dataclass
class Totals:
    """What was looked at."""

    schedules: int = 0
    requests: int = 0
    aborted: int = 0
    steps: int = 0
    tokens: int = 0
    request_steps: int = 0
    planted_tokens: int = 0
    planted_steps: int = 0
    preemptions: int = 0
    flushes: int = 0
    cached_tokens: int = 0
    padded_drafts: int = 0
    cut_drafts: int = 0
    prompt_pieces: int = 0
    skipped_drafts: int = 0
    blocks: int = 0
    hidden_rows: int = 0
    ties: int = 0
    adaptive: int = 0
    unasked: int = 0
    text_nodes: int = 0
    drawn_drafts: int = 0
    reports: int = 0
    reloads: int = 0
    sleeps: int = 0
    turns: int = 0

    def __str__(self) -> str:
        parts = [f"{name.replace('_', ' ')} {value}" for name, value in vars(self).items()]
        return ", ".join(parts)


@dataclass
class Running:
    """One request while it runs.

    Attributes:
        ask: what was asked.
        truth: the whole answer.
        longer: the answer without the limits of its length, to be planted.
        seen: what it has said so far.
        done: it ended or was aborted.
        tied: two tokens scored the same, and it took the other one: what follows has nothing to be compared with.
        free: its candidates are drawn, so its tokens need only be possible ones.
    """

    ask: Ask
    truth: list[int]
    longer: list[int]
    seen: list[int] = field(default_factory=list)
    done: bool = False
    tied: bool = False
    free: bool = False
