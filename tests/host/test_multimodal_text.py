"""A multimodal model that serves text alone (`language_model_only`), with trees: the tokens of plain vLLM."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engines import Oracle, random_prompts, random_tree, start
from tiny_llama import save_random_heads

pytestmark = pytest.mark.slow

LLAMA = {
    "model_type": "llama", "vocab_size": 160, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256,
    "initializer_range": 0.35, "dtype": "float32",
}  # fmt: skip
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "image_size": 32, "patch_size": 16}


def test_its_text(tmp_path, monkeypatch):
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration
    from vllm import ModelRegistry, SamplingParams

    name = "Idefics3ForConditionalGeneration"
    # The host would look at this kind of model in a process of its own, for ten seconds.
    monkeypatch.setitem(ModelRegistry.models, name, ModelRegistry.models[name])
    ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
    torch.manual_seed(7)
    model = tmp_path / "model"
    config = Idefics3Config(
        text_config=LLAMA, vision_config=VISION, image_token_id=159, pad_token_id=0, dtype="float32"
    )
    Idefics3ForConditionalGeneration(config).save_pretrained(model)
    torch.manual_seed(11)
    heads = tmp_path / "heads"
    save_random_heads(heads, num_heads=4, num_layers=1, root_conditioned=True, hidden_size=64, vocab_size=160)
    options = {"language_model_only": True, "max_model_len": 256, "block_size": 32}
    prompts = random_prompts(np.random.default_rng(3), [3, 8, 21, 33], 159)
    params = [SamplingParams(max_tokens=40, ignore_eos=True, temperature=i % 2, seed=i) for i in range(4)]
    truth = start(model, **options).tokens(prompts, params)
    trees = start(model, heads, medusa={"num_speculative_tokens": 12, "adaptive": False}, **options)
    assert trees.tokens(prompts, params) == truth
    by_prompt = {tuple(prompt): answer for prompt, answer in zip(prompts, truth, strict=True)}
    trees.runner._draft = Oracle(trees, by_prompt, lambda rng: random_tree(rng, 12), vocab=159)
    assert trees.tokens(prompts, params) == truth
    report = trees.runner.medusa_report()
    assert report["drafted_nodes"] > 500 and report["mean_accepted_length"] > 1.3
