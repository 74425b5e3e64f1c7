"""What texts expect, found for all at once, against the search that reads one text after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_medusa.tree import tensor_lookup
from vllm_medusa.tree.lookup import FIRST_ODDS, FIRST_WEIGHT, LONGEST, MEMORY, Lookups
from vllm_medusa.tree.tensor_lookup import TensorExpected, TensorLookups

ROOM, MOST = 64, 6
TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=ROOM), min_size=1, max_size=4)


def laid(texts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts [S, ROOM] as the host keeps them, what it may have left behind their ends, and their lengths."""
    left = torch.full((len(texts), ROOM), 2, dtype=torch.int32)
    for row, text in enumerate(texts):
        left[row, : len(text)] = torch.tensor(text)
    return left, torch.tensor([len(text) for text in texts], dtype=torch.int32)


def follow(lookups: TensorLookups, texts: list[list[int]], slots: list[int] | None = None) -> TensorExpected:
    slots = list(range(len(texts))) if slots is None else slots
    return lookups.follow(*laid(texts), torch.tensor(slots), max(len(texts[slot]) for slot in slots))


def new(slots: int = 1) -> TensorLookups:
    return TensorLookups(slots, MOST, torch.device("cpu"))


@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_the_same_is_expected(texts):
    """Of texts that were never seen before; the last slot first, as a batch may have it."""
    order = list(range(len(texts)))[::-1]
    found = follow(new(len(texts)), texts, order)
    for row, slot in enumerate(order):
        text = np.array(texts[slot], dtype=np.int32)
        truth = Lookups().follow([("r", text, len(text))], MOST)
        assert found.tokens[row].tolist() == truth.tokens[0].tolist()
        assert found.odds[row].tolist() == truth.odds[0].tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=3, max_size=ROOM))
def test_one_token_at_a_time_the_same_is_learnt(text):
    """Until two matches are as long as matches are told apart: which of them is followed may differ."""
    tensors, truth = new(), Lookups()
    for end in range(1, len(text) + 1):
        read = [("r", np.array(text, dtype=np.int32), end)]
        wanted, found = truth.follow(read, MOST), follow(tensors, [text[:end]])
        if truth._matches["r"][1] == LONGEST:
            return
        assert found.tokens.tolist() == wanted.tokens.tolist()
        assert found.odds.tolist() == wanted.odds.tolist()
        assert tensors.odds() == truth.odds()


def test_of_several_tokens_those_up_to_the_first_surprise_are_counted():
    lookups = new(2)
    follow(lookups, [[1, 2, 3, 1], [7]])  # 2, 3, 1, ... is expected; nothing is
    follow(lookups, [[1, 2, 3, 1, 2, 3, 9, 9], [7, 7, 7, 7, 7]])
    hits, tries = lookups._tally.T.tolist()
    seen = [tries[same] - FIRST_WEIGHT for same in range(1, LONGEST + 1)]
    assert seen == [1, 1, 1] + [0] * (LONGEST - 3)
    gained = [hits[same] - FIRST_ODDS[same - 1] * FIRST_WEIGHT for same in (1, 2, 3)]
    assert gained == pytest.approx([1, 1, 0])


def test_a_slot_with_another_text_has_nothing_to_learn_from():
    lookups = new()
    follow(lookups, [[1, 2, 3, 1]])
    before = lookups.odds()
    lookups.clear(0)
    assert follow(lookups, [[1, 2, 3, 1, 9]]).tokens.tolist() == [[-1] * MOST]
    assert lookups.odds() == before
    follow(lookups, [[1, 2, 3, 1, 9, 1]])
    follow(lookups, [[1, 2, 3, 1, 9, 1, 2]])
    assert lookups.odds() != before


def test_old_matches_fade():
    lookups = new()
    for _ in range(MEMORY // MOST + 10):
        follow(lookups, [[5] * 40])
        follow(lookups, [[5] * 40 + [5] * MOST])
    hits, tries = lookups._tally[LONGEST].tolist()
    assert MEMORY / 2 <= tries <= MEMORY + MOST and hits / tries > 0.99


def test_texts_are_searched_as_far_back_as_the_batch_allows(monkeypatch):
    """Two texts share the places: each is searched eight tokens back."""
    near, far = [1, 2, *[9, 8, 7, 6, 5], 1], [1, 2, 3, *[9, 8, 7, 6, 5, 4], 1]
    assert follow(new(2), [near, far]).tokens[:, 0].tolist() == [2, 2]
    monkeypatch.setattr(tensor_lookup, "PLACES", 16)
    assert follow(new(2), [near, far]).tokens[:, 0].tolist() == [2, -1]
    assert follow(new(2), [near, far], [1]).tokens[:, 0].tolist() == [2]


def test_shapes_follow_what_the_host_knows():
    """A longer text than the batch has changes nothing, nor does a slot without one."""
    lookups = new(2)
    texts, lengths = laid([[1, 2, 3, 1, 2], []])
    for longest in (5, 6, 64):
        found = lookups.follow(texts, lengths, torch.tensor([0, 1]), longest)
        assert found.tokens[:, 0].tolist() == [3, -1]
