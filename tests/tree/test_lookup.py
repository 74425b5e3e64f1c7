"""What a text expects next, against a search that remembers nothing."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_medusa.tree.lookup import CATCH_UP, FIRST_ODDS, LONGEST, MEMORY, PART, REACH, Expected, Lookups, _longest

pytestmark = pytest.mark.usefixtures("way")

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def follow(lookups: Lookups, text: list[int], most: int = 8, request: str = "r") -> Expected:
    return lookups.follow([(request, np.array(text, dtype=np.int32), len(text))], most)


def longest_match(text: list[int], length: int | None = None) -> tuple[int, int]:
    """(where it goes on, tokens that match), the latest of the longest; `text` is the end of one of `length` tokens."""
    found = (-1, 0)
    before = (length or len(text)) - len(text)
    for end in range(1, len(text)):
        same = 0
        while same < min(end, LONGEST) and text[end - 1 - same] == text[len(text) - 1 - same]:
            same += 1
        if same >= max(found[1], 1):
            found = (before + end, same)
    return found


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_a_new_text_expects_what_followed_its_longest_match(text):
    source, same = longest_match(text)
    found = follow(Lookups(), text)
    if source < 0:
        assert found.tokens.tolist() == [[-1] * 8]
        assert found.odds.sum() == 0
        return
    longer = list(text)
    for _ in range(8):  # round and round where the match runs into the end
        longer.append(longer[source + len(longer) - len(text)])
    assert found.tokens[0].tolist() == longer[len(text) :]
    first = FIRST_ODDS[min(same, LONGEST) - 1]
    assert found.odds[0, 0] == pytest.approx(first)
    assert (np.diff(found.odds[0]) >= 0).all()  # the longer a match, the surer


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(0, 2**32 - 1))
def test_followed_in_pieces_a_match_goes_on_as_long_as_it_holds(text, seed):
    """What is expected after each piece always followed an earlier copy of the text's end."""
    rng = np.random.default_rng(seed)
    lookups, length = Lookups(), 0
    while length < len(text):
        length = min(length + int(rng.integers(1, 6)), len(text))
        expected = int(follow(lookups, text[:length]).tokens[0, 0])
        if text[length - 1] not in text[: length - 1]:
            assert expected == -1
        else:
            followers = {text[i + 1] for i in range(length - 1) if text[i] == text[length - 1]}
            assert expected in followers


def test_odds_are_learnt_from_every_token_drafted_or_not():
    rng = np.random.default_rng(0)
    lookups, text = Lookups(), [1, 2, 3, 4]
    before = lookups.odds()
    for _ in range(3000):  # a text that half the time says after 1 2 what it said before
        text += [1, 2, 5] if rng.random() < 0.5 else [1, 2, int(rng.integers(100, 10**6))]
        follow(lookups, text)
    after = lookups.odds()
    assert before[0] == pytest.approx(FIRST_ODDS[0])
    assert after[1] < 0.7
    assert after != before


def test_odds_follow_a_text_that_changes_its_ways():
    lookups = Lookups()
    text = [7]
    for _ in range(MEMORY + 100):
        text.append(7)  # always as before
        follow(lookups, text[-2 * LONGEST :], request=f"r{len(text)}")  # new each time: nothing to learn from
        follow(lookups, text)
    sure = lookups.odds()[-1]
    assert sure > 0.99
    rng = np.random.default_rng(1)
    loop = list(range(20))
    for _ in range(600):
        text += [*loop, int(rng.integers(100, 10**6))]  # a match of 20, then something new
        follow(lookups, text)
    assert lookups.odds()[-1] < sure - 0.1


def test_a_long_break_is_not_followed_token_by_token():
    lookups = Lookups()
    follow(lookups, [1, 2, 3, 1, 2])
    before = lookups.odds()
    text = [1, 2, 3, 1, 2] + [9, 8] * CATCH_UP
    assert follow(lookups, text).tokens[0, :3].tolist() == [9, 8, 9]
    assert lookups.odds() == before


def test_a_text_that_got_shorter_is_read_anew():
    lookups = Lookups()
    follow(lookups, [1, 2, 3, 4, 1, 2, 3])
    assert follow(lookups, [1, 2, 3, 4, 1]).tokens[0, :2].tolist() == [2, 3]


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 30, 3000]), st.integers(0, 5))
def test_long_texts(seed, tokens, copied):
    """Longer than a part, and than the reach: as the search that remembers nothing, of which parts know nothing."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, tokens, int(rng.integers(1, 2 * PART))).tolist()
    text = (text + text[: 5 * copied] + [7] * copied) * (1 + 8 * (copied == 5))
    assert _longest(np.array(text), len(text)) == longest_match(text[-REACH - 1 :], len(text))


@pytest.mark.parametrize("text", ["random", "one token", "a loop"])
def test_long_texts_cost_little(text):
    """Without a compiler too: 65,536 tokens, a step of which nothing was expected."""
    given = np.random.default_rng(0).integers(0, 50_000, REACH).astype(np.int32)
    given = {"random": given, "one token": given * 0, "a loop": given % 997}[text]
    given[::4096] += 1
    lookups, steps = Lookups(), []
    for length in range(len(given) - 40, len(given)):
        began = time.thread_time()
        lookups.follow([("r", given, length)], 8)
        steps.append(time.thread_time() - began)
    assert sorted(steps)[len(steps) // 2] < 1.5e-3


def test_requests_do_not_read_each_other_and_are_forgotten():
    lookups = Lookups()
    texts = [("a", np.array([1, 2, 3, 1]), 4), ("b", np.array([1, 9, 9, 9]), 1)]
    assert lookups.follow(texts, 2).tokens.tolist() == [[2, 3], [-1, -1]]
    assert len(lookups) == 2
    lookups.forget(["a", "never seen"])
    assert len(lookups) == 1


def test_reach_is_the_product_of_odds():
    expected = Expected(np.array([[4, 5]]), np.array([[0.5, 0.5]], dtype=np.float32))
    assert expected.reach.tolist() == [[0.5, 0.25]]
    assert Expected.nothing(3).reach.shape == (3, 0)
