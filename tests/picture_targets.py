"""Tiny random targets that take pictures, each with a real processor; and pictures, and prompts with some of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_llama import save_random_heads, small_tokenizer
from tiny_targets import SIZES

SIDE = 64
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "patch_size": 16}
WORDS = "red green blue and red and blue, 12 345 6789 {} "
IMAGE = "<image>"  # in prompts, for any of them
# One with two pictures, and one that begins with its picture.
PROMPTS = (
    f"red{IMAGE}and blue",
    "red green blue and red 12 345",
    f"{IMAGE}green",
    f"{IMAGE}and{IMAGE}blue, 12",
    "6789 and",
)
# Engines of any of them.
OPTIONS: dict[str, Any] = {
    "block_size": 32, "skip_tokenizer_init": False, "enable_prefix_caching": True, "limit_mm_per_prompt": {"image": 2},
    "mm_processor_cache_gb": 0,
}  # fmt: skip


def save_idefics3(folder: Path) -> None:
    """A model whose text is a Llama's, with a processor that cuts pictures into tiles."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    special = (IMAGE, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles)
    tokenizer = small_tokenizer(WORDS, 320, special=special)
    pixels = Idefics3ImageProcessorPil(size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE})
    Idefics3Processor(pixels, tokenizer, image_seq_len=4).save_pretrained(folder)
    ends = _ends(tokenizer)
    config = Idefics3Config(
        text_config={**SIZES, **ends, "model_type": "llama", "vocab_size": len(tokenizer)},
        vision_config={**VISION, "image_size": SIDE}, image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        scale_factor=2, pad_token_id=0, dtype="float32", initializer_range=0.35, **ends,
    )  # fmt: skip
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)


def save_paddleocr_vl(folder: Path) -> None:
    """A model with M-RoPE: tokens of a picture have a row and a column, and text goes on where the longer side ends."""
    from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration, PaddleOCRVLProcessor
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil

    tokenizer = small_tokenizer(WORDS, 320, special=(IMAGE,), named={"image_token": IMAGE})
    patch = VISION["patch_size"]
    sizes = {"shortest_edge": 4 * patch * patch, "longest_edge": (6 * patch) ** 2}
    pixels = PaddleOCRVLImageProcessorPil(patch_size=patch, merge_size=2, size=sizes)
    PaddleOCRVLProcessor(pixels, tokenizer).save_pretrained(folder)
    ends = _ends(tokenizer)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    config = PaddleOCRVLConfig(
        text_config={**SIZES, **ends, "vocab_size": len(tokenizer), "rope_parameters": rope},
        vision_config={**VISION, "num_hidden_layers": 2, "image_size": SIDE, "initializer_range": 0.35},
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE), tie_word_embeddings=False, dtype="float32", **ends,
    )  # fmt: skip
    PaddleOCRVLForConditionalGeneration(config).save_pretrained(folder)


def save_qwen3_vl(folder: Path) -> None:
    """A model with interleaved M-RoPE, whose pictures reach the first layers too; vLLM needs torchvision for it."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    named = {
        "image_token": IMAGE, "video_token": "<video>", "vision_start_token": "<vision>",
        "vision_end_token": "</vision>",
    }  # fmt: skip
    tokenizer = small_tokenizer(WORDS, 320, special=tuple(named.values()), named=named)
    patch = VISION["patch_size"]
    sizes = {"shortest_edge": 4 * patch * patch, "longest_edge": (6 * patch) ** 2}
    pixels = Qwen2VLImageProcessorPil(patch_size=patch, merge_size=2, size=sizes)
    Qwen3VLProcessor(pixels, tokenizer, Qwen3VLVideoProcessor(patch_size=patch)).save_pretrained(folder)
    ends, ids = (
        _ends(tokenizer),
        {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in named.items()},
    )
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    config = Qwen3VLConfig(
        text_config={**SIZES, **ends, "vocab_size": len(tokenizer), "rope_parameters": rope},
        vision_config={
            "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "patch_size": patch, "depth": 2,
            "out_hidden_size": SIZES["hidden_size"], "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
            "initializer_range": 0.35,
        },
        tie_word_embeddings=False, dtype="float32", **ends, **ids,
    )  # fmt: skip
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)


def save_gemma3(folder: Path) -> None:
    """A model whose image tokens see each other both ways, one layer with a window; vLLM needs torchvision for it."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    named = {"boi_token": IMAGE, "image_token": "<soft>", "eoi_token": "</image>"}
    ends_of_lines = tuple("\n" * count for count in range(1, 5))  # tokens by which vLLM finds pictures
    tokenizer = small_tokenizer(WORDS, 320, special=(*named.values(), *ends_of_lines), named=named)
    pixels = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    Gemma3Processor(pixels, tokenizer, image_seq_length=4).save_pretrained(folder)
    ends = _ends(tokenizer)
    ids = {f"{name}_index": tokenizer.convert_tokens_to_ids(token) for name, token in named.items()}
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
    config = Gemma3Config(
        text_config={**SIZES, **ends, **windows, "vocab_size": len(tokenizer), "query_pre_attn_scalar": 32},
        vision_config={**VISION, "num_hidden_layers": 2, "image_size": SIDE, "vision_use_head": False},
        mm_tokens_per_image=4, initializer_range=0.35, tie_word_embeddings=False, dtype="float32", **ends, **ids,
    )  # fmt: skip
    model = Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)  # zero from the start
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")  # as the checkpoints that people have name them
    named_so = {name.replace("vision_tower.", "vision_tower.vision_model."): weight for name, weight in weights.items()}
    save_file(named_so, folder / "model.safetensors", metadata={"format": "pt"})


def _lacks_torchvision() -> str:
    """Why what needs torchvision cannot run here, in its own words; empty: it can."""
    try:
        import torchvision  # noqa: F401
    except Exception as error:  # noqa: BLE001 (it fails in many ways when built for another torch)
        return f"{type(error).__name__}: {error}"
    return ""


SAVE = {"idefics3": save_idefics3, "paddleocr_vl": save_paddleocr_vl, "qwen3_vl": save_qwen3_vl, "gemma3": save_gemma3}
LACKS = dict.fromkeys(("qwen3_vl", "gemma3"), _lacks_torchvision())
KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(bool(LACKS.get(kind)), reason=LACKS.get(kind, ""))) for kind in SAVE
]


def save_picture_target(kind: str, folder: Path) -> tuple[Path, Path]:
    """Save a model of a `kind` of SAVE, its processor and random heads; returns the folders of model and heads."""
    from transformers import AutoTokenizer

    model, heads = folder / kind, folder / f"{kind}-heads"
    torch.manual_seed(7)
    SAVE[kind](model)
    shape = {"hidden_size": SIZES["hidden_size"], "vocab_size": len(AutoTokenizer.from_pretrained(model))}
    torch.manual_seed(11)
    save_random_heads(heads, num_heads=4, num_layers=1, root_conditioned=True, **shape)
    return model, heads


def requests(*, blank: bool = False) -> list[dict[str, Any]]:
    """PROMPTS with pictures, all different; `blank`: of the same sizes, in one colour."""
    rng, made, number = np.random.default_rng(5), [], 0
    for prompt in PROMPTS:
        shown = []
        for _ in range(prompt.count(IMAGE)):
            pixels = rng.integers(0, 256, (40 + 30 * number, 150 - 20 * number, 3), dtype=np.uint8)
            pixels[..., number % 3] = np.linspace(0, 255, pixels.shape[1])
            shown.append(Image.fromarray(np.full_like(pixels, 99) if blank else pixels))
            number += 1
        made.append({"prompt": prompt, **({"multi_modal_data": {"image": shown}} if shown else {})})
    return made


def asked(engine: Any, prompts: list[dict[str, Any]], params: Any) -> list[tuple[tuple[int, ...], list[int]]]:
    """Prompt, as the processor made it, and answer of each request."""
    outputs = engine.llm.generate(prompts, params, use_tqdm=False)
    return [(tuple(output.prompt_token_ids), list(output.outputs[0].token_ids)) for output in outputs]


def architecture(model: Path) -> str:
    """As the config names it."""
    import json

    return str(json.loads((model / "config.json").read_text())["architectures"][0])


def _ends(tokenizer: Any) -> dict[str, int]:
    return {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
