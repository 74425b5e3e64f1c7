"""Every key of `speculative_config` with values of every wrong type: one error that names the key and the value."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from good_folders import make_ours

from vllm_medusa.config import MedusaConfig, resolve
from vllm_medusa.errors import MedusaError

WRONG: dict[str, dict[str, Any]] = {
    "model": {
        "nothing": None, "empty": "", "number": 3, "truth": True, "list": ["heads"], "object": {"path": "heads"},
        "bytes": b"heads",
    },
    "num_speculative_tokens": {
        "truth": True, "falsehood": False, "whole fraction": 8.0, "fraction": 8.5, "text": "8", "none of them": 0,
        "negative": -1, "one too many": 129, "beyond 64 bits": 10**30, "5000 digits": 10**5000,
        "no number": float("nan"),
        "without end": float("inf"), "list": [8], "object": {}, "bytes": b"8",
    },
    "tree": {
        "nothing": None, "number": 7, "fraction": 0.5, "truth": True, "object": {"0": []}, "empty": [],
        "empty text": "",
        "unknown": "oak", "capitals": "Dynamic", "empty path": [[]], "truths": [[True]], "digits": [["0"]],
        "fractions": [[0.0]], "negative": [[-1]], "nothings": [[None]], "numbers": [0, 1], "texts": ["0"],
        "deep": [[[0]]],
        "gap": [[1, 0]], "twice": [[0], [0]], "too deep": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0, 0]],
        "too wide": [[10]], "too many": [[0]] * 129, "huge": [[10**5000]], "tuples": ((0,), (0,)), "set": {0},
        "bytes": b"dynamic", "generator": (path for path in [[0]]),
    },
    "adaptive": {"nothing": None, "one": 1, "zero": 0, "text": "true", "list": [], "fraction": 1.0},
    "draft_vocab": {"nothing": None, "one": 1, "zero": 0, "text": "false", "list": [], "fraction": 0.0},
    "prompt_lookup": {"nothing": None, "one": 1, "zero": 0, "text": "yes", "list": [], "fraction": 1.0},
    "draft_sample_method": {
        "nothing": None, "unknown": "magic", "capitals": "Greedy", "truth": True, "number": 0, "list": ["greedy"],
    },
    "linear_product": {"nothing": None, "unknown": "fast", "capitals": "Auto", "truth": True, "number": 1, "list": []},
    "unknown": {"key": 1}, "": {"key": 1}, "num speculative tokens": {"key": 1}, "a\nb\x1b[2J": {"key": 1},
}  # fmt: skip
CASES = {f"{key or 'empty'}: {kind}": (key, value) for key, kinds in WRONG.items() for kind, value in kinds.items()}


def settings_of(given: dict[str, Any]) -> Any:
    """As the engine does it, for heads four deep of ten candidates."""
    config, _ = MedusaConfig.parse({"method": "medusa", "model": "heads", **given})
    return resolve(config, "heads", num_heads=4, top_k=10, rank_accuracy=None, default_nodes=8)


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_value_is_named_by_its_key(name: str) -> None:
    key, value = CASES[name]
    with pytest.raises(MedusaError) as caught:
        settings_of({key: value})
    message = str(caught.value)
    shown = key if key.isprintable() else repr(key)[1:-1]
    assert message.startswith(f"medusa: {shown}=") and message.isprintable() and len(message) < 500


def test_what_is_right_stays_right() -> None:
    """The strictness above refuses nothing that it should take."""
    for tree in ("dynamic", "static", "chain", "mc_sim_7b_63", [[0], [0, 0]], [(0,), (1,)], ((0,), (1,))):
        settings_of({"tree": tree})
    settings_of({"num_speculative_tokens": None, "adaptive": False, "draft_sample_method": "probabilistic"})
    settings_of({"model": Path("heads"), "num_speculative_tokens": 128})


ENGINE: dict[str, tuple[Any, dict[str, Any], str]] = {
    "text": ("medusa", {}, "speculative_config='medusa': give a dict"),
    "JSON as text": (json.dumps({"method": "medusa", "model": "HEADS"}), {}, "give a dict"),
    "no heads": ({"method": "medusa"}, {}, "model=None"),
    "a number for a key": ({"method": "medusa", "model": "HEADS", 1: 2}, {}, "1=2: unknown key"),
    "one key twice": (
        {"method": "medusa", "model": "HEADS", "num_speculative_tokens": 4, "num-speculative-tokens": 5},
        {},
        "num_speculative_tokens=5: given twice",
    ),
    "a list in additional_config": (
        {"method": "medusa", "model": "HEADS"},
        {"additional_config": [1]},
        "additional_config=[1]",
    ),
    "a wrong value of the host's": (
        {"method": "medusa", "model": "HEADS", "max_model_len": "many"},
        {},
        "max_model_len",
    ),
    "truths in a tree": ({"method": "medusa", "model": "HEADS", "tree": [[True]]}, {}, "tree=[True]"),
    "spoilt heads": ({"method": "medusa", "model": "SPOILT"}, {}, "config.json"),
}


@pytest.mark.parametrize("name", ENGINE)
def test_the_engine_refuses_it_before_weights_load(name: str, tmp_path: Path) -> None:
    """With our error, or the host's own where the key is the host's."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_medusa.plugin import register

    register()
    model = tmp_path / "model"
    model.mkdir()
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 50, "num_hidden_layers": 1}
    (model / "config.json").write_text(json.dumps({**config, **sizes, "max_position_embeddings": 64}))
    heads, spoilt = make_ours(tmp_path / "heads"), make_ours(tmp_path / "spoilt")
    (spoilt / "config.json").write_text("[")
    given, options, says = ENGINE[name]
    if isinstance(given, dict):
        folders = {"HEADS": str(heads), "SPOILT": str(spoilt)}
        given = {key: folders.get(value, value) if key == "model" else value for key, value in given.items()}
    args = EngineArgs(model=str(model), skip_tokenizer_init=True, speculative_config=given, **options)
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        args.create_engine_config()
    assert "host" in name or isinstance(caught.value, MedusaError)
