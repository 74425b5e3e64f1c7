"""Whatever `SamplingParams` asks: hundreds of request shapes in mixed batches, each answered as by plain vLLM."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import Engine, Oracle, random_tree
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from shapes import shapes
from ties import Referee, Tie

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


@dataclass
class Comparison:
    """Both engines asked the same, and what came of it."""

    plain: Engine
    trees: Engine
    drafting: Any
    referee: Referee
    shapes: int = 0
    tokens: int = 0
    ties: list[Tie] = field(default_factory=list)

    def ask(self, asked: list[dict[str, Any]], seed: int) -> None:
        """One batch; trees are drawn by `seed`. An answer may differ behind a tie, and nowhere else."""
        tokenizer = self.plain.llm.get_tokenizer()
        prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
        truth = ask(self.plain, prompts, asked)
        found = self._with_trees(prompts, asked, truth, seed)
        for prompt, shape, ours, theirs in zip(prompts, asked, found, truth, strict=True):
            try:
                compare_outputs(shape, ours, theirs)
            except AssertionError as difference:
                ties = self._judge(prompt, shape, ours, theirs)
                if not ties:
                    again = self._with_trees(prompts, asked, truth, seed)
                    same = [tokens_of(output) for output in again] == [tokens_of(output) for output in found]
                    print(f"seed {seed}; with the same trees it comes {'again' if same else 'otherwise'}: {difference}")
                    raise
                print(f"seed {seed}: {ties}")
                self.ties += ties
        self.shapes += len(asked)
        self.tokens += sum(len(tokens) for output in found for tokens in tokens_of(output))

    def _with_trees(self, prompts: list[list[int]], asked: Any, truth: list[Any], seed: int) -> list[Any]:
        answers = {
            (tuple(prompt), completion.index): [*completion.token_ids, *[5] * 8]
            for prompt, output in zip(prompts, truth, strict=True)
            for completion in output.outputs
        }
        vocab = self.plain.runner.model_config.get_vocab_size()
        rng = np.random.default_rng(seed)
        self.drafting(Oracle(self.trees, answers, lambda rng: random_tree(rng, 18), rng, vocab=vocab))
        return ask(self.trees, prompts, asked)

    def _judge(self, prompt: list[int], shape: dict[str, Any], ours: Any, theirs: Any) -> list[Tie]:
        """The ties at which the answers to one request part; none if anything else differs."""
        ties = []
        for copy, (a, b) in enumerate(zip(tokens_of(ours), tokens_of(theirs), strict=True)):
            if a == b:
                continue
            tie = self.referee.judge(prompt, params_of(shape), copy, a, b)
            if tie is None:
                return []
            ties.append(tie)
        return ties


def tokens_of(output: Any) -> list[list[int]]:
    return [list(completion.token_ids) for completion in output.outputs]


@pytest.fixture
def comparison(speaker: Engine, speaker_medusa: Engine, drafting: Any, speaker_model: Path) -> Comparison:
    return Comparison(speaker, speaker_medusa, drafting, Referee(speaker, speaker_model))


def test_every_shape_is_answered_as_in_plain_decoding(comparison, words):
    vocab = comparison.plain.runner.model_config.get_vocab_size()
    comparison.trees.runner.medusa_report(reset=True)

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
        comparison.ask(asked, seed)

    compare()
    report = comparison.trees.runner.medusa_report()
    print(f"{comparison.shapes} shapes, {comparison.tokens} tokens, accepted {report['mean_accepted_length']:.2f}")
    print(f"ties: {comparison.ties}")
    assert comparison.shapes >= 200
    assert report["mean_accepted_length"] > 1.4


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True},
    {"temperature": 0.7, "seed": 3, "max_tokens": 32, "ignore_eos": True},
    {"temperature": 0.0, "max_tokens": 32, "repetition_penalty": 1.2, "logprobs": 1},
    {"temperature": 1.0, "seed": 5, "top_p": 0.9, "max_tokens": 32, "n": 2},
]


@pytest.mark.parametrize("lost", [1, 4])
def test_one_lost_commit_is_not_excused(comparison, monkeypatch, lost):
    """A planted fault: of one step's accepted rows none is moved."""
    asked = (MIXED * BATCH)[:BATCH]
    comparison.ask(asked, seed=8)
    assert comparison.ties == []
    cache, count = comparison.trees.runner.tree_cache, []
    commit = cache.commit

    def forgetful(sources: Any, targets: Any) -> None:
        count.append(len(sources) > 0)
        if sum(count) != lost or not count[-1]:
            commit(sources, targets)

    monkeypatch.setattr(cache, "commit", forgetful)
    with pytest.raises(AssertionError):
        comparison.ask(asked, seed=8)
    assert sum(count) >= lost


def test_what_is_a_tie(comparison):
    """The two tokens that a sampler wavers between are one if they are as likely, and not if one is likelier."""
    prompt = comparison.plain.llm.get_tokenizer()("Who is there?")["input_ids"]
    params = params_of({"temperature": 0.0, "max_tokens": 6, "ignore_eos": True})
    said = comparison.plain.tokens([prompt], params)[0]
    logits = comparison.referee.logits([*prompt, *said[:3]])
    second = int(logits.topk(2).indices[1])
    other = [*said[:3], second, *said[4:]]
    assert comparison.referee.judge(prompt, params, 0, other, said) is None
    weights = comparison.referee.logits
    tied = logits.clone()
    tied[second] = tied.max() - 1e-6
    comparison.referee.logits = lambda _: tied
    assert comparison.referee.judge(prompt, params, 0, other, said) == (
        second,
        said[3],
        (float(tied[second]), float(tied.max())),
    )
    comparison.referee.logits = weights
    assert comparison.referee.judge(prompt, params, 0, said[:4], said) is None, "no tie where an answer only ends"


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
