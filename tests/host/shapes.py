"""Request shapes: what `SamplingParams` can ask, drawn by Hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

GRAMMARS = [
    {"regex": r"(red|green|blue)( and (red|green|blue)){2}"},
    {"choice": ["certainly not", "certainly", "perhaps"]},
    {"json": {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"]}},
]


def _maybe(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Some of these fields, or none."""
    return st.fixed_dictionaries({}, optional=fields)


def shapes(vocab: int, words: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Keyword arguments of a `SamplingParams` with a determined answer: greedy or seeded.

    Args:
        vocab: V of the target.
        words: texts that answers are likely to hold, for stop strings and bad words.
    """
    tokens = st.integers(3, vocab - 1)
    random = st.fixed_dictionaries(
        {"temperature": st.sampled_from([0.3, 0.7, 1.0, 1.6]), "seed": st.integers(0, 2**31)},
        optional={
            "top_k": st.sampled_from([1, 2, 20, 200]),
            "top_p": st.sampled_from([0.1, 0.7, 0.95]),
            "min_p": st.sampled_from([0.01, 0.2]),
        },
    )
    choosing = st.one_of(st.just({"temperature": 0.0}), random)
    changing = _maybe(
        presence_penalty=st.sampled_from([-1.0, 0.6, 2.0]),
        frequency_penalty=st.sampled_from([-0.7, 0.4, 1.5]),
        repetition_penalty=st.sampled_from([0.8, 1.2, 2.0]),
        logit_bias=st.dictionaries(tokens, st.sampled_from([-20.0, -2.0, 3.0, 8.0]), min_size=1, max_size=6),
        bad_words=st.lists(st.sampled_from(words), min_size=1, max_size=3, unique=True),
    )
    limiting = st.one_of(
        st.just({}),
        _maybe(allowed_token_ids=st.lists(tokens, min_size=30, max_size=60, unique=True)),
        st.fixed_dictionaries({"grammar": st.sampled_from(GRAMMARS)}),
    )
    ending = _maybe(
        max_tokens=st.integers(1, 48),
        min_tokens=st.integers(1, 12),
        stop=st.lists(st.sampled_from(words), min_size=1, max_size=2, unique=True),
        include_stop_str_in_output=st.booleans(),
        stop_token_ids=st.lists(tokens, min_size=1, max_size=40, unique=True),
        ignore_eos=st.booleans(),
        repetition_detection=st.sampled_from([{"max_pattern_size": 3, "min_count": 2}]),
        n=st.integers(1, 3),
    )
    showing = st.one_of(
        st.just({}),
        _maybe(logprobs=st.sampled_from([0, 1, 5]), prompt_logprobs=st.sampled_from([0, 3])),
    )
    extra = _maybe(no_repeat=st.integers(1, 6), alternate=st.just(True)).map(
        lambda found: {"extra_args": found} if found else {}
    )
    return st.tuples(choosing, changing, limiting, ending, showing, extra).map(_together)


def _together(parts: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    shape: dict[str, Any] = {"max_tokens": 32}
    for part in parts:
        shape |= part
    if "min_tokens" in shape:
        shape["min_tokens"] = min(shape["min_tokens"], shape["max_tokens"])
    if "grammar" in shape:  # what may leave no token at all ends in an error of the host's, in plain decoding too
        for key in ("bad_words", "extra_args", "logit_bias"):
            shape.pop(key, None)
    if shape["temperature"] == 0.0:
        shape.pop("n", None)  # copies of one greedy answer
    return shape
