"""One thing that was looked at, and what follows from it."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "bad"]


@dataclass(frozen=True)
class Finding:
    """What was found.

    Attributes:
        subject: what was looked at, in a word or two.
        state: "ok"; "note": Medusa serves, but there is something to know; "bad": it cannot serve.
        detail: what is there.
        advice: what to do about it, "" where nothing is to be done.
    """

    subject: str
    state: State
    detail: str
    advice: str = ""
