"""What tests of pictures run in the interpreter's process: the same asked of plain vLLM and of trees."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from device_engines import DeviceOracle, Steps, any_tree, drafting, engine
from picture_targets import OPTIONS, architecture, asked, requests
from tiny_targets import inspected_here


def compare_pictures(model: Path, heads: Path) -> dict[str, Any]:
    """What trees say, what plain vLLM does (told), and mean tokens a request and step (length).

    Two requests at once: the third's prompt, with a picture, is computed beside trees.
    """
    from vllm import SamplingParams

    shared: dict[str, Any] = {**OPTIONS, "attention": "TRITON_ATTN", "max_num_seqs": 2}
    prompts = requests()[:3]
    params = [SamplingParams(max_tokens=6 + 6 * i, ignore_eos=True, temperature=i % 2, seed=i) for i in range(3)]
    with inspected_here(architecture(model)):
        told = asked(engine(model, **shared), prompts, params)
        trees = engine(model, heads, is_async=True, **shared)
    vocab = trees.llm.llm_engine.model_config.get_vocab_size()
    texts = [[*prompt, *answer] for prompt, answer in told]
    with Steps(trees) as steps, drafting(DeviceOracle(trees, texts, any_tree, vocab)):
        said = asked(trees, prompts, params)
    return {"told": told, "said": said, "length": steps.length}


def seeing_both_ways(pair: tuple[Path, Path], folder: Path) -> tuple[Path, Path]:
    """The same model, said in `folder` to be one whose image tokens see each other both ways."""
    model = folder / "both-ways"
    shutil.copytree(pair[0], model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "is_mm_prefix_lm": True}))
    return model, pair[1]
