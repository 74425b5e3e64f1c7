"""Where answers end and what is told about them: stops inside a path, log-probabilities, copies, beams, adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import MAX_LEN, VOCAB, Engine, Oracle, random_prompts, random_tree, start

pytestmark = pytest.mark.slow

PROMPTS = random_prompts(np.random.default_rng(31), [3, 9, 31, 32, 33, 40])
SIZES = {"max_model_len": MAX_LEN, "block_size": 32}
EOS = VOCAB - 1


def compare(
    plain: Engine, trees: Engine, drafting, prompts, params, close: float = 1e-4
) -> tuple[list[Any], list[Any]]:
    """Outputs of both engines, equal in tokens, text, reasons and log-probabilities; paths are planted."""
    requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    truth = plain.llm.generate(requests, params, use_tqdm=False)
    answers = {
        (tuple(prompt), completion.index): [*completion.token_ids, *[5] * 8]
        for prompt, output in zip(prompts, truth, strict=True)
        for completion in output.outputs
    }
    vocab = plain.runner.model_config.get_vocab_size()
    drafting(Oracle(trees, answers, lambda rng: random_tree(rng, 16), np.random.default_rng(7), 0.1, vocab))
    found = trees.llm.generate(requests, params, use_tqdm=False)
    for ours, theirs in zip(found, truth, strict=True):
        same_logprobs(ours.prompt_logprobs, theirs.prompt_logprobs, close)
        for a, b in zip(ours.outputs, theirs.outputs, strict=True):
            assert list(a.token_ids) == list(b.token_ids)
            assert (a.text, a.finish_reason, a.stop_reason) == (b.text, b.finish_reason, b.stop_reason)
            same_logprobs(a.logprobs, b.logprobs, close)
    return found, truth


def same_logprobs(ours: Any, theirs: Any, close: float) -> None:
    """Equal up to `close`; ranks too, but for ties, which far from the top are many."""
    assert (ours is None) == (theirs is None)
    for a, b in zip(ours or (), theirs or (), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert set(a) == set(b)
            assert [a[t].logprob for t in a] == pytest.approx([b[t].logprob for t in a], abs=close)
            for t in a:
                own = a[t].logprob  # -inf is as far from itself as nothing is, by subtraction
                tied = sum(own == other.logprob or abs(own - other.logprob) < 2 * close for other in a.values()) - 1
                assert abs(a[t].rank - b[t].rank) <= tied + b[t].rank // 20


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_at_each_place_of_a_path(speaker, speaker_medusa, drafting, include):
    """Each place of one long answer in turn completes the stop string."""
    from vllm import SamplingParams

    prompt = speaker.llm.get_tokenizer()("Count from one to ten.")["input_ids"]
    text = speaker.answer([prompt], SamplingParams(temperature=0, max_tokens=48, ignore_eos=True))[0].text
    prompts = [prompt] * 24
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=48,
            ignore_eos=True,
            stop=[text[place : place + 3]],
            include_stop_str_in_output=include,
        )
        for place in range(10, 34)
    ]
    whole = speaker.tokens([prompt], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))[0]
    truth = speaker.answer(prompts, params)
    vocab = speaker.runner.model_config.get_vocab_size()
    for seed in range(3):
        oracle = Oracle(speaker_medusa, {tuple(prompt): whole}, lambda rng: random_tree(rng, 16), vocab=vocab)
        oracle.rng = np.random.default_rng(seed)
        drafting(oracle)
        found = speaker_medusa.answer(prompts, params)
        for ours, theirs in zip(found, truth, strict=True):
            assert (list(ours.token_ids), ours.text) == (list(theirs.token_ids), theirs.text)
            assert (ours.finish_reason, ours.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
    assert len({len(c.token_ids) for c in truth}) > 4


def test_min_tokens_of_a_model_that_wants_to_stop_at_every_step(tiny, tiny_medusa, drafting):
    from vllm import SamplingParams

    wanted = list(range(0, VOCAB, 2))
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=20,
            min_tokens=least,
            stop_token_ids=wanted[:64],
            logit_bias=dict.fromkeys(wanted[:64], 12.0),
        )
        for least in range(1, 13)
    ]
    prompts = random_prompts(np.random.default_rng(33), [5] * 12)
    found, _ = compare(tiny, tiny_medusa, drafting, prompts, params)
    assert [len(output.outputs[0].token_ids) for output in found] == list(range(2, 14))


@pytest.mark.parametrize("ignore", [False, True])
def test_end_of_sequence_as_inner_node_leaf_and_bonus(tiny, tiny_medusa, drafting, ignore):
    """Trees in which the end comes at any depth, and goes on below."""
    from vllm import SamplingParams

    prompts = random_prompts(np.random.default_rng(34), [6] * 12)
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=24, ignore_eos=ignore, logit_bias={EOS: 4.0 + i % 3})
        for i in range(12)
    ]
    _, truth = compare(tiny, tiny_medusa, drafting, prompts, params)
    if not ignore:
        assert sum(output.outputs[0].finish_reason == "stop" for output in truth) >= 6
        assert len({len(output.outputs[0].token_ids) for output in truth}) > 3


def test_bad_words_and_every_max_tokens_together(tiny, tiny_medusa, drafting):
    from vllm import SamplingParams

    said = tiny.tokens(PROMPTS, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    params, prompts = [], []
    for i in range(1, 21):
        p = SamplingParams(temperature=0, max_tokens=i, ignore_eos=True)
        answer = said[i % len(PROMPTS)]
        p._bad_words_token_ids = [answer[i % 5 : i % 5 + 2], [answer[-1]]]
        params.append(p)
        prompts.append([*PROMPTS[i % len(PROMPTS)], 3 + i])
    found, _ = compare(tiny, tiny_medusa, drafting, prompts, params)
    assert [len(output.outputs[0].token_ids) for output in found] == list(range(1, 21))


LOGPROBS: list[dict[str, Any]] = [
    {"logprobs": 0},
    {"logprobs": 5},
    {"logprobs": -1},
    {"logprob_token_ids": [3, 17, 99]},
    {"prompt_logprobs": 4},
    {"logprobs": 3, "prompt_logprobs": 0, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize("fields", LOGPROBS, ids=str)
@pytest.mark.parametrize("choosing", [{"temperature": 0}, {"temperature": 0.8, "top_k": 30, "seed": 3}], ids=str)
def test_log_probabilities(tiny, tiny_medusa, drafting, fields, choosing):
    from vllm import SamplingParams

    found, _ = compare(tiny, tiny_medusa, drafting, PROMPTS, SamplingParams(max_tokens=24, **choosing, **fields))
    if "logprobs" in fields:
        assert all(len(o.outputs[0].logprobs) == len(o.outputs[0].token_ids) for o in found)


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits", "raw_logits"])
def test_other_kinds_of_log_probabilities(tiny_model, tiny_heads, drafting, mode):
    """After temperature, top-k and penalties, or not normalised, where the engine is told so."""
    from vllm import SamplingParams

    options = {**SIZES, "logprobs_mode": mode}
    plain = start(tiny_model, **options)
    trees = start(tiny_model, tiny_heads, **options, medusa={"num_speculative_tokens": 16, "adaptive": False})
    for choosing in ({"temperature": 0}, {"temperature": 0.7, "top_k": 9, "seed": 2, "repetition_penalty": 1.2}):
        # Logits are large here (up to 50), and a temperature of .7 stretches them: the rounding of float32 with them.
        compare(plain, trees, drafting, PROMPTS, SamplingParams(max_tokens=20, logprobs=4, **choosing), close=5e-4)


def test_eight_seeded_copies(tiny, tiny_medusa, drafting):
    from vllm import SamplingParams

    params = SamplingParams(n=8, temperature=1.0, seed=12, max_tokens=24, logprobs=0)
    found, truth = compare(tiny, tiny_medusa, drafting, PROMPTS[:3], params)
    for ours, theirs in zip(found, truth, strict=True):
        assert len({tuple(c.token_ids) for c in ours.outputs}) > 4
        best = [max(o.outputs, key=lambda c: c.cumulative_logprob).index for o in (ours, theirs)]
        assert best[0] == best[1]


def test_beam_search(speaker, speaker_medusa):
    from vllm.sampling_params import BeamSearchParams

    tokenizer = speaker.llm.get_tokenizer()
    prompts = [{"prompt_token_ids": tokenizer(text)["input_ids"]} for text in ("Who is there?", "Name a colour.")]
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    found, truth = (engine.llm.beam_search(prompts, params) for engine in (speaker_medusa, speaker))
    for ours, theirs in zip(found, truth, strict=True):
        assert [s.tokens for s in ours.sequences] == [s.tokens for s in theirs.sequences]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter for the tiny model, strong enough to change its answers."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("adapter")
    generator = torch.Generator().manual_seed(2)
    weights = {}
    for layer in range(2):
        for name, outputs in (("q_proj", 128), ("v_proj", 64)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(8, 128, generator=generator) * 0.3
            weights[f"{at}.lora_B.weight"] = torch.randn(outputs, 8, generator=generator) * 0.3
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_adapters_on_the_target(tiny_model, tiny_heads, drafting, adapter):
    """Requests with and without a LoRA adapter in one batch."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    options = {**SIZES, "enable_lora": True, "max_lora_rank": 8}
    plain = start(tiny_model, **options)
    trees = start(tiny_model, tiny_heads, **options, medusa={"num_speculative_tokens": 16, "adaptive": False})
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    adapters = [LoRARequest("tiny", 1, str(adapter)) if i % 2 else None for i in range(len(PROMPTS))]
    requests = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    truth = plain.llm.generate(requests, params, lora_request=adapters, use_tqdm=False)
    answers = {tuple(p): [*o.outputs[0].token_ids, *[5] * 8] for p, o in zip(PROMPTS, truth, strict=True)}
    drafting(Oracle(trees, answers, lambda rng: random_tree(rng, 16)))
    trees.runner.medusa_report(reset=True)
    found = trees.llm.generate(requests, params, lora_request=adapters, use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in found] == [list(o.outputs[0].token_ids) for o in truth]
    assert trees.runner.medusa_report()["mean_accepted_length"] > 1.5
    assert [list(o.outputs[0].token_ids) for o in truth] != plain.tokens(PROMPTS, params), "the adapter must matter"


def test_drawn_drafts_serve_every_kind_of_request(tiny_model, tiny_heads, tiny):
    """`draft_sample_method: "probabilistic"`: greedy requests as in plain decoding, sampled ones repeat by seed."""
    from vllm import SamplingParams

    medusa = {"num_speculative_tokens": 12, "adaptive": False, "draft_sample_method": "probabilistic"}
    trees = start(tiny_model, tiny_heads, **SIZES, medusa=medusa)
    mixed = [
        SamplingParams(temperature=0, max_tokens=30),
        SamplingParams(temperature=1.0, seed=4, max_tokens=30, logprobs=2),
        SamplingParams(temperature=0.7, top_p=0.9, seed=5, max_tokens=30, repetition_penalty=1.2),
        SamplingParams(temperature=0, max_tokens=30, presence_penalty=0.5),
        SamplingParams(temperature=2.0, max_tokens=30),
        SamplingParams(temperature=1.0, min_p=0.1, seed=6, max_tokens=30),
    ]
    trees.runner.medusa_report(reset=True)
    first, second = trees.answer(PROMPTS, mixed), trees.answer(PROMPTS, mixed)
    truth = tiny.answer(PROMPTS, mixed)
    for row, params in enumerate(mixed):
        if params.temperature == 0:
            assert first[row].token_ids == truth[row].token_ids
        if params.seed is not None:
            assert first[row].token_ids == second[row].token_ids
    assert len(first[1].logprobs) == len(first[1].token_ids)
    report = trees.runner.medusa_report()
    assert report["drafted_nodes"] > 0 and report["mean_accepted_length"] > 1.0
