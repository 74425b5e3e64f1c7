"""Prompts with pictures, mixed with text: plain vLLM's tokens, on a tiny random Idefics 3 with a real processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import MAX_LEN, Engine, Oracle, random_tree, start
from PIL import Image
from tiny_llama import save_random_heads, small_tokenizer
from tiny_targets import SIZES, inspected_here

pytestmark = pytest.mark.slow
NAME = "Idefics3ForConditionalGeneration"
SIDE = 64
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "image_size": SIDE, "patch_size": 16}
SPECIAL = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model whose text is a Llama's, with a processor that cuts pictures into tiles; and heads."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    folder = tmp_path_factory.mktemp("pictures")
    tokenizer = small_tokenizer("red green blue and red and blue, 12 345 6789 {} ", 320, special=(*SPECIAL, *TILES))
    pixels = Idefics3ImageProcessorPil(size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE})
    Idefics3Processor(pixels, tokenizer, image_seq_len=4).save_pretrained(folder / "model")
    image = tokenizer.convert_tokens_to_ids("<image>")
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    text = {**SIZES, **ends, "model_type": "llama", "vocab_size": len(tokenizer)}
    torch.manual_seed(7)
    config = Idefics3Config(
        text_config=text, vision_config=VISION, image_token_id=image, scale_factor=2, pad_token_id=0, dtype="float32",
        initializer_range=0.35, **ends,
    )  # fmt: skip
    Idefics3ForConditionalGeneration(config).save_pretrained(folder / "model")
    shape = {"hidden_size": SIZES["hidden_size"], "vocab_size": len(tokenizer)}
    save_random_heads(folder / "heads", num_heads=4, num_layers=1, root_conditioned=True, **shape)
    return folder / "model", folder / "heads"


def pictures(count: int) -> list[Any]:
    """Noise of different sizes, over which a colour runs."""
    rng = np.random.default_rng(5)
    made = []
    for number in range(count):
        height, width = 40 + 30 * number, 150 - 20 * number
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        pixels[..., number % 3] = np.linspace(0, 255, width)
        made.append(Image.fromarray(pixels))
    return made


def asked(engine: Engine, requests: list[dict[str, Any]], params: Any) -> list[tuple[tuple[int, ...], list[int]]]:
    """Prompt, as the processor made it, and answer of each request."""
    outputs = engine.llm.generate(requests, params, use_tqdm=False)
    return [(tuple(output.prompt_token_ids), list(output.outputs[0].token_ids)) for output in outputs]


def test_pictures_between_texts(target: tuple[Path, Path]) -> None:
    """Greedy and seeded, one with two pictures, with the prefix cache; prompts in pieces beside trees."""
    from vllm import SamplingParams

    model, heads = target
    options: dict[str, Any] = {
        "max_model_len": MAX_LEN, "block_size": 32, "skip_tokenizer_init": False, "enable_prefix_caching": True,
        "limit_mm_per_prompt": {"image": 2}, "max_num_seqs": 3, "mm_processor_cache_gb": 0,
    }  # fmt: skip
    some = pictures(4)
    requests: list[dict[str, Any]] = [
        {"prompt": "red<image>and blue", "multi_modal_data": {"image": some[0]}},
        {"prompt": "red green blue and red 12 345"},
        {"prompt": "<image>green", "multi_modal_data": {"image": some[1]}},
        {"prompt": "<image>and<image>blue, 12", "multi_modal_data": {"image": [some[2], some[3]]}},
        {"prompt": "6789 and red"},
    ]
    params = [SamplingParams(max_tokens=36, ignore_eos=True, temperature=i % 2, seed=i) for i in range(5)]
    medusa = {"num_speculative_tokens": 12, "adaptive": False}
    with inspected_here(NAME):
        plain = start(model, **options)
        told = asked(plain, requests, params)
        trees = start(model, heads, medusa=medusa, **options)
    assert max(len(prompt) for prompt, _ in told) > 40, "pictures take places of the prompt"
    unseen = [{"prompt": one["prompt"].replace("<image>", "")} for one in requests]
    assert asked(plain, unseen, params)[0][1] != told[0][1], "what is in a picture matters"
    assert asked(trees, requests, params) == told
    vocab = trees.llm.llm_engine.model_config.get_vocab_size()
    trees.runner._draft = Oracle(trees, dict(told), lambda rng: random_tree(rng, 12), vocab=vocab)
    trees.runner.medusa_report(reset=True)
    for _ in range(2):  # the second time from the prefix cache
        assert asked(trees, requests, params) == told
    assert trees.runner.medusa_report()["mean_accepted_length"] > 2
