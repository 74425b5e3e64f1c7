"""Prompt lookup on the device that drafts: what `lookup.py` does for one text after the other, for all of them at once.

A search compares every place of a text with its last LONGEST tokens, one token of theirs after the other: that needs no
index that would have to be kept, and its shapes do not depend on what is found. It takes 48 passes of one byte to five
over the places, about 230 bytes of memory traffic each, and 30 bytes of memory each while it runs. Texts are searched
REACH tokens back, fewer where PLACES would not do for the batch: 256 requests of 131,072 tokens are searched 8,192
tokens back, in 0.5 GB of traffic and 63 MB of memory; 32 requests all of REACH. Kept are 8 (DEEPEST + 2) bytes a slot,
37 kB for 256.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_medusa.tree.lookup import FIRST_ODDS, FIRST_WEIGHT, LONGEST, MEMORY, REACH

# Tokens of a text that a tree may hold in one path. Half of what the CPU's trees may: each costs a round of the walk
# where requests are sampled, and a match of odds 0.93 (the surest of FIRST_ODDS) is expected to bring 9.1 tokens out
# of 16, and 12.0 out of 32.
DEEPEST = 16
PLACES = 1 << 21  # that one step compares


class TensorExpected(NamedTuple):
    """What the texts of B requests expect next, up to L tokens.

    Attributes:
        tokens: int64 [B, L], -1 from where nothing is expected.
        odds: float32 [B, L], the probability of each if all before it are right.
    """

    tokens: Tensor
    odds: Tensor


class TensorLookups:
    """What each slot's text was expected to say next, and the odds of matches by length; nothing waits for the device.

    The same rules as `Lookups`, but for two. The match is looked for anew each time: of two that are LONGEST tokens or
    longer it is the later one, where `Lookups` stays with the one that it follows. And of the tokens that a text got
    since the last call, the odds learn up to the first that was not expected, while `Lookups` looks up its next match
    there. One token at a time there is no difference.

    >>> texts = torch.tensor([[5, 6, 7, 8, 5, 6, 0, 0]], dtype=torch.int32)  # "5 6" stood here before
    >>> lookups = TensorLookups(1, 3, texts.device)
    >>> found = lookups.follow(texts, torch.tensor([6]), torch.tensor([0]), longest=6)
    >>> found.tokens.tolist(), found.odds[0].tolist() == [0.5, torch.tensor(0.65).item(), torch.tensor(0.7).item()]
    ([[7, 8, 5]], True)
    """

    def __init__(self, slots: int, most: int, device: torch.device) -> None:
        """Nothing expected in any of `slots`, L = `most` tokens wanted, the odds of FIRST_ODDS."""
        odds = torch.tensor((0.0, *FIRST_ODDS), dtype=torch.float64, device=device)
        self._tally = torch.stack((odds * FIRST_WEIGHT, torch.full_like(odds, FIRST_WEIGHT)), dim=1)
        self._expected = torch.full((slots, most), -1, dtype=torch.int64, device=device)
        self._same = torch.zeros(slots, dtype=torch.int64, device=device)
        self._known = torch.zeros(slots, dtype=torch.int64, device=device)
        self._steps = torch.arange(most, device=device)

    @property
    def most(self) -> int:
        """L, tokens wanted."""
        return len(self._steps)

    def clear(self, slot: int) -> None:
        """A slot has another text: what was expected of the one before teaches nothing."""
        self._expected[slot].fill_(-1)

    def follow(self, texts: Tensor, lengths: Tensor, slots: Tensor, longest: int) -> TensorExpected:
        """Learn from what is new in the texts of `slots` and say what they expect next.

        Args:
            texts: int32 [S, M], of all slots.
            lengths: integers [S], how many tokens of each exist.
            slots: int64 [B], each once.
            longest: none of their texts is longer; known to the host, so that shapes can follow.
        """
        length = lengths[slots].to(torch.int64)
        self._learn(texts, length, slots)
        back = min(REACH, max(PLACES // len(slots), 1), 1 << max(longest - 1, 1).bit_length())
        source, same = _longest(texts, length, slots, back)
        found = (same > 0)[:, None]
        around = (length - source).clamp(min=1)[:, None]  # where this runs into the text's end it goes round
        places = source[:, None] + self._steps % around
        tokens = texts[slots[:, None], places.clamp(0, texts.shape[1] - 1)].to(torch.int64).where(found, -1)
        self._expected[slots], self._same[slots], self._known[slots] = tokens, same, length
        tally = self._tally[(same[:, None] + self._steps).clamp(max=LONGEST)]
        return TensorExpected(tokens, (tally[..., 0] / tally[..., 1]).to(torch.float32).where(found, 0.0))

    def odds(self) -> list[float]:
        """How often a match of 1, 2, ... LONGEST tokens goes on, as known now. This waits for the device."""
        return [round(hits / tries, 4) for hits, tries in self._tally[1:].tolist()]

    def _learn(self, texts: Tensor, length: Tensor, slots: Tensor) -> None:
        """Count how far what was expected came true."""
        known, expected = self._known[slots, None], self._expected[slots]
        places = known + self._steps
        said = texts[slots[:, None], places.clamp(max=texts.shape[1] - 1)]
        right = ((said == expected) & (places < length[:, None])).cumprod(dim=1)
        before = torch.nn.functional.pad(right[:, :-1], (1, 0), value=1)
        tried = (before > 0) & (expected >= 0) & (places < length[:, None])
        same = (self._same[slots, None] + self._steps).clamp(max=LONGEST).where(tried, 0)  # nobody reads place 0
        counted = torch.stack((right, torch.ones_like(right)), dim=2).to(torch.float64)
        self._tally *= torch.where(self._tally[:, 1:] >= MEMORY, 0.5, 1.0)
        self._tally.index_add_(0, same.flatten(), counted.flatten(0, 1))


def _longest(texts: Tensor, length: Tensor, slots: Tensor, back: int) -> tuple[Tensor, Tensor]:
    """Where the longest earlier copy of each text's end goes on (of equals the latest), and its length in tokens.

    Args:
        texts: int32 [S, M].
        length: int64 [B], of the texts of `slots`.
        slots: int64 [B].
        back: W, tokens back that a copy may end.

    Returns:
        int64 [B] each; length 0: there is none.
    """
    end = torch.arange(-back - LONGEST, 0, device=texts.device)
    places = length[:, None] + end
    window = texts[slots[:, None], places.clamp(min=0)].where(places >= 0, -1)  # the last W + LONGEST tokens
    last = window[:, -LONGEST:].where(places[:, -LONGEST:] >= 0, -2)
    matches = window[:, LONGEST - 1 : -1] == last[:, -1:]  # [B, W]: a copy of the last token; of the last k tokens
    same = matches.to(torch.uint8)
    for k in range(1, LONGEST):
        matches &= window[:, LONGEST - 1 - k : -1 - k] == last[:, -1 - k, None]
        same += matches
    rank = torch.arange(back, dtype=torch.int32, device=texts.device)
    best = (same.to(torch.int32) * back + rank).amax(dim=1).to(torch.int64)
    return length - back + best % back, best // back
