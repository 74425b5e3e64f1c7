"""Prompt lookup: the last time a request's text read like its end does now, this is what came next.

Heads guess from one hidden row and know few tokens; a copied name, a repeated line of code or the figures of a question
they cannot see. The text itself can (prompt lookup decoding, Saxena 2023; "ngram" in vLLM). What it says joins the
heads' candidates in one tree (mixture.py), so it needs an honest probability: how often a match of that length went
on matching, learnt from every token that any request emits, drafted or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_medusa.tree import native

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Text = tuple[str, npt.NDArray[np.integer[Any]], int]

LONGEST = 16  # matches are told apart up to this length, in tokens
REACH = 65_536  # tokens back that a match is looked for
PART = 8192  # tokens that are compared at once where nothing is compiled
MEMORY = 4096  # matches of a length after which old ones begin to fade
CATCH_UP = 64  # tokens that are followed one by one; after a longer break the match is looked for anew

# How often a match of 1, 2, ... tokens went on, before anything has been seen: SmolLM2-135M-Instruct's greedy answers
# to MT-Bench, HumanEval and GSM8K prompts, rounded; and for how many matches this counts.
FIRST_ODDS = (0.2, 0.5, 0.65, 0.7, 0.75, 0.77, 0.8, 0.82, 0.84, 0.86, 0.86, 0.87, 0.87, 0.88, 0.9, 0.93)
FIRST_WEIGHT = 20.0


class Expected(NamedTuple):
    """What the texts of B requests expect next, up to L tokens.

    Attributes:
        tokens: int64 [B, L], -1 from where nothing is expected.
        odds: float32 [B, L], the probability of each if all before it are right.
    """

    tokens: Ints
    odds: Floats

    @property
    def reach(self) -> Floats:
        """float32 [B, L], the probability that each token and all before it are right."""
        return np.asarray(np.cumprod(self.odds, axis=1), dtype=np.float32)

    @classmethod
    def nothing(cls, batch: int, most: int = 0) -> Expected:
        """No token for any request."""
        return cls(np.full((batch, most), -1, dtype=np.int64), np.zeros((batch, most), dtype=np.float32))


class Lookups:
    """The match of every request, and the odds of matches by length.

    >>> Lookups().follow([("a", np.array([5, 6, 7, 8, 5, 6], dtype=np.int32), 6)], 3)  # "5 6" stood here before
    Expected(tokens=array([[7, 8, 5]]), odds=array([[0.5 , 0.65, 0.7 ]], dtype=float32))
    """

    def __init__(self) -> None:
        """No request, and the odds of FIRST_ODDS."""
        odds = np.array((0.0, *FIRST_ODDS))
        self._tally = np.stack([odds * FIRST_WEIGHT, np.full(LONGEST + 1, FIRST_WEIGHT)], axis=1)
        self._matches: dict[str, Ints] = {}

    def follow(self, texts: Sequence[Text], most: int) -> Expected:
        """Read what is new in requests' texts and say what their matches expect next.

        Args:
            texts: B of (request, tokens, length): its id; its prompt and emitted tokens, integers [>= length]; how
                many of them exist. A request's text must be the one of the call before, gone on.
            most: L, tokens wanted.
        """
        expected = Expected.nothing(len(texts), most)
        library, tally = native.load(), self._tally
        for row, (request, text, length) in enumerate(texts):
            match = self._matches.get(request)
            if match is None:
                match = self._matches[request] = np.array([-1, 0, 0])
            tokens, odds = expected.tokens[row], expected.odds[row]
            if library is None:
                _follow(text[:length], match, tally, tokens, odds)
                continue
            text = np.ascontiguousarray(text[:length], dtype=np.int32)
            library.medusa_follow(
                *(text.ctypes.data, length, match.ctypes.data, tally.ctypes.data),
                *(LONGEST, REACH, CATCH_UP, MEMORY, most, tokens.ctypes.data, odds.ctypes.data),
            )
        return expected

    def forget(self, requests: Iterable[str]) -> None:
        """Drop requests that ended."""
        for request in requests:
            self._matches.pop(request, None)

    def odds(self) -> list[float]:
        """How often a match of 1, 2, ... LONGEST tokens goes on, as known now."""
        return [round(float(hits / tries), 4) for hits, tries in self._tally[1:]]

    def __len__(self) -> int:
        return len(self._matches)


def _follow(
    text: npt.NDArray[np.integer[Any]], match: Ints, tally: npt.NDArray[np.float64], tokens: Ints, odds: Floats
) -> None:
    """Read the tokens since the last call, count whether the match foretold them, move or replace it, and go on."""
    source, same, known = (int(value) for value in match)
    length = len(text)
    if known == 0 or known > length or length - known > CATCH_UP:
        source, same = _longest(text, length)
        known = length
    for place in range(known, length):
        right = source >= 0 and text[source] == text[place]
        if source >= 0:
            if tally[same, 1] >= MEMORY:
                tally[same] *= 0.5
            tally[same] += (right, 1.0)
        if right:
            source, same = source + 1, min(same + 1, LONGEST)
        else:
            source, same = _longest(text, place + 1)
    match[:] = source, same, length
    for step in range(len(tokens) if source >= 0 else 0):
        place = source + step  # where this runs into the text's end it goes round, as a loop would
        tokens[step] = text[place] if place < length else tokens[place - length]
        hits, tries = tally[min(same + step, LONGEST)]
        odds[step] = hits / tries


def _longest(text: npt.NDArray[np.integer[Any]], length: int) -> tuple[int, int]:
    """Where the longest earlier copy of the text's end goes on (of equals the latest), and its length in tokens.

    A part of the text at a time, the latest first: all places at which the last token stood before, then those of them
    where the token before it is right too, and so on. So Python's own steps are few, also where a text repeats itself.
    """
    last, best, source = length - 1, 0, -1
    oldest = max(last - REACH, 0)
    for end in range(last, oldest, -PART):
        begin = max(end - PART, oldest)
        places = np.flatnonzero(text[begin:end] == text[last]) + begin
        same = 0
        while len(places):
            same += 1
            if same > best:
                best, source = same, int(places[-1]) + 1
            if same == LONGEST:
                return source, best
            places = places[places >= same]
            places = places[text[places - same] == text[last - same]]
    return source, best
