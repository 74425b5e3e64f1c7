"""Whatever `SamplingParams` asks: hundreds of request shapes in mixed batches, each answered as by plain vLLM."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from engines import Engine, Oracle, random_tree
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from shapes import shapes

pytestmark = pytest.mark.slow
BATCH = 16
ROUNDS = 200 if os.environ.get("MEDUSA_LONG") else 13  # of 16 shapes each
PROMPTS = [
    "Yes", "Who is there, and why?", "Count from one to ten.", "A", "The rain in Spain stays", "Name a colour.",
    "def add(a, b):", "Translate to German: the cat sleeps on the warm stone wall.", "1 2 3 4", "Once upon a time",
    "Tell me a story about a lighthouse keeper who finds a letter in a bottle, and keeps it for a year.",
    "Why?", "List five fruits.", "What is the capital of France?", "Hello, ", "If a train goes 60 km in 40 minutes",
]  # fmt: skip


def params_of(shape: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

    fields = dict(shape)
    if "repetition_detection" in fields:
        fields["repetition_detection"] = RepetitionDetectionParams(**fields["repetition_detection"])
    grammar = fields.pop("grammar", None)
    if grammar is not None:
        fields["structured_outputs"] = StructuredOutputsParams(**grammar)
    return SamplingParams(**fields)


def ask(engine: Engine, prompts: list[list[int]], asked: list[dict[str, Any]]) -> list[Any]:
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    return engine.llm.generate(requests, [params_of(shape) for shape in asked], use_tqdm=False)


@pytest.fixture(scope="module")
def words(speaker: Engine) -> list[str]:
    """Pieces of what the model says."""
    from vllm import SamplingParams

    texts = [o.outputs[0].text for o in speaker.llm.generate(PROMPTS, SamplingParams(temperature=0), use_tqdm=False)]
    pieces = {word for text in texts for word in (*text.split()[:6], text[3:6])}
    return sorted(piece for piece in pieces if piece.strip())


def test_every_shape_is_answered_as_in_plain_decoding(speaker, speaker_medusa, drafting, words):
    tokenizer = speaker.llm.get_tokenizer()
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    vocab = speaker.runner.model_config.get_vocab_size()
    counted = {"shapes": 0, "tokens": 0, "repeated": 0}
    speaker_medusa.runner.medusa_report(reset=True)

    @settings(
        max_examples=ROUNDS,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(shapes(vocab, words), min_size=BATCH, max_size=BATCH), st.integers(0, 2**32 - 1))
    def compare(asked: list[dict[str, Any]], seed: int) -> None:
        truth = ask(speaker, prompts, asked)
        answers = {
            (tuple(prompt), completion.index): [*completion.token_ids, *[5] * 8]
            for prompt, output in zip(prompts, truth, strict=True)
            for completion in output.outputs
        }
        rng = np.random.default_rng(seed)
        drafting(Oracle(speaker_medusa, answers, lambda rng: random_tree(rng, 18), rng, vocab=vocab))
        found = ask(speaker_medusa, prompts, asked)
        try:
            for shape, ours, theirs in zip(asked, found, truth, strict=True):
                compare_outputs(shape, ours, theirs)
        except AssertionError as difference:
            # Seen once in a score of runs, and not again on the same shapes: presumably two tokens so near to each
            # other that rounding decides (the fuzzer has met such a pair, 3e-6 apart in plain vLLM). A fault is there
            # again when all is asked anew.
            print(f"asked anew (seed {seed}): {difference}")
            counted["repeated"] += 1
            truth, found = ask(speaker, prompts, asked), ask(speaker_medusa, prompts, asked)
            for shape, ours, theirs in zip(asked, found, truth, strict=True):
                compare_outputs(shape, ours, theirs)
        counted["shapes"] += len(asked)
        counted["tokens"] += sum(len(c.token_ids) for output in found for c in output.outputs)

    compare()
    report = speaker_medusa.runner.medusa_report()
    print(f"{counted['shapes']} shapes, {counted['tokens']} tokens, accepted {report['mean_accepted_length']:.2f}")
    assert counted["shapes"] >= 200
    assert counted["repeated"] <= 1 + counted["shapes"] // 1600
    assert report["mean_accepted_length"] > 1.4


def compare_outputs(shape: dict[str, Any], ours: Any, theirs: Any) -> None:
    assert len(ours.outputs) == len(theirs.outputs) == shape.get("n", 1)
    for a, b in zip(ours.outputs, theirs.outputs, strict=True):
        assert list(a.token_ids) == list(b.token_ids), shape
        assert (a.text, a.finish_reason, a.stop_reason) == (b.text, b.finish_reason, b.stop_reason), shape
        compare_logprobs(shape, a.logprobs, b.logprobs)
        if a.cumulative_logprob is not None:
            assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-3, nan_ok=True), shape
    compare_logprobs(shape, ours.prompt_logprobs, theirs.prompt_logprobs)


def compare_logprobs(shape: dict[str, Any], ours: Any, theirs: Any) -> None:
    assert (ours is None) == (theirs is None), shape
    for a, b in zip(ours or (), theirs or (), strict=True):
        assert (a is None) == (b is None), shape
        if a is None:
            continue
        assert set(a) == set(b), shape
        for token in a:
            assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-4, nan_ok=True), shape
            assert a[token].decoded_token == b[token].decoded_token, shape
            # Far from the top, tokens lie closer together than float32 rounds.
            assert abs(a[token].rank - b[token].rank) <= b[token].rank // 20, shape
