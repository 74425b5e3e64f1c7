"""Bad settings: one error at start-up that names key, value and fix, before the target's weights load."""

from __future__ import annotations

import json

import pytest

from vllm_medusa.config import MedusaConfig, resolve
from vllm_medusa.errors import MedusaError

BAD = {
    "unknown key": ({"modell": 3}, "modell=3"),
    "nodes as text": ({"num_speculative_tokens": "eight"}, "num_speculative_tokens='eight'"),
    "nodes as a fraction": ({"num_speculative_tokens": 2.5}, "num_speculative_tokens=2.5"),
    "no nodes": ({"num_speculative_tokens": 0}, "num_speculative_tokens=0"),
    "too many nodes": ({"num_speculative_tokens": 129}, "1 to 128"),
    "adaptive as text": ({"adaptive": "yes"}, "adaptive='yes'"),
    "adaptive as a number": ({"adaptive": 1}, "adaptive=1"),
    "draft_vocab": ({"draft_vocab": None}, "draft_vocab=None"),
    "sample method": ({"draft_sample_method": "magic"}, "draft_sample_method='magic'"),
    "unknown tree": ({"tree": "oak"}, "tree='oak'"),
    "tree as a number": ({"tree": 7}, "tree=7"),
    "empty tree": ({"tree": []}, "tree"),
    "orphan": ({"tree": [[0], [1, 0]]}, "[1, 0]"),
    "duplicate": ({"tree": [[0], [0]]}, "tree"),
    "deeper than the heads": ({"tree": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0, 0]]}, "heads"),
    "rank beyond top-k": ({"tree": [[10]]}, "10"),
    "negative rank": ({"tree": [[-1]]}, "tree"),
    "text in a tree": ({"tree": [["a"]]}, "tree"),
    "empty path": ({"tree": [[]]}, "tree"),
    "missing file": ({"tree": "no-such-file.json"}, "no-such-file.json"),
}


@pytest.mark.parametrize("name", BAD)
def test_each_mistake_is_named(name, tiny_heads):
    given, named = BAD[name]
    with pytest.raises(MedusaError) as caught:
        config, _ = MedusaConfig.parse({"method": "medusa", "model": str(tiny_heads), **given})
        resolve(config, config.model, num_heads=4, top_k=10, rank_accuracy=None, default_nodes=16)
    message = str(caught.value)
    assert message.startswith("medusa: ") and named in message and "\n" not in message


def test_more_than_128_nodes_are_refused(tiny_heads):
    tree = [[a] for a in range(10)] + [[a, b] for a in range(10) for b in range(10)]
    tree += [[a, b, 0] for a in range(10) for b in range(2)]
    with pytest.raises(MedusaError, match="128"):
        config, _ = MedusaConfig.parse({"model": str(tiny_heads), "tree": tree})
        resolve(config, config.model, num_heads=4, top_k=10, rank_accuracy=None, default_nodes=16)


def test_host_keys_pass_through():
    config, rest = MedusaConfig.parse({"model": "x", "max_model_len": 64}, frozenset({"max_model_len"}))
    assert rest == {"max_model_len": 64} and config.tree == "dynamic" and config.adaptive


def test_a_tree_from_a_file(tmp_path, tiny_heads):
    file = tmp_path / "tree.json"
    file.write_text(json.dumps([[0], [0, 0], [1]]))
    config, _ = MedusaConfig.parse({"model": str(tiny_heads), "tree": str(file)})
    settings = resolve(config, "h", num_heads=4, top_k=10, rank_accuracy=None, default_nodes=16)
    assert settings.parents == [0, 1, 0] and settings.num_speculative_tokens == 3


@pytest.mark.parametrize(
    "tree, nodes, expected",
    [("chain", None, 4), ("chain", 2, 2), ("static", 8, 8), ("dynamic", 20, 20), ("dynamic", None, 16)],
)
def test_number_of_nodes(tree, nodes, expected):
    config, _ = MedusaConfig.parse({"model": "x", "tree": tree, "num_speculative_tokens": nodes})
    settings = resolve(config, "h", num_heads=4, top_k=10, rank_accuracy=None, default_nodes=16)
    assert settings.num_speculative_tokens == expected


ENGINE_BAD = {
    "missing folder": (lambda heads, tmp: {"model": str(tmp / "nowhere")}, {}, "nowhere"),
    "unknown key": (lambda heads, tmp: {"model": str(heads), "trees": 1}, {}, "trees=1"),
    "two ways to say it": (
        lambda heads, tmp: {"model": str(heads)},
        {"spec_tokens": 3, "_twice": True},
        "num_speculative_tokens",
    ),
    "kv cache dtype": (
        lambda heads, tmp: {"model": str(heads)},
        {"kv_cache_dtype": "int8_per_token_head"},
        "kv_cache_dtype='int8_per_token_head'",
    ),
    "own worker": (
        lambda heads, tmp: {"model": str(heads)},
        {"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"},
        "worker_cls",
    ),
}


@pytest.mark.parametrize("name", ENGINE_BAD)
def test_engine_arguments_are_refused_before_weights_load(name, tiny_model, tiny_heads, tmp_path):
    from vllm.engine.arg_utils import EngineArgs

    build, options, named = ENGINE_BAD[name]
    speculative = {"method": "medusa", **build(tiny_heads, tmp_path)}
    if options.pop("_twice", False):
        speculative["num_speculative_tokens"] = 4
    args = EngineArgs(model=str(tiny_model), skip_tokenizer_init=True, speculative_config=speculative, **options)
    with pytest.raises(MedusaError) as caught:
        args.create_engine_config()
    assert named in str(caught.value)


def test_heads_of_another_model_are_refused(tiny_model, tmp_path):
    from vllm.engine.arg_utils import EngineArgs

    from vllm_medusa.heads.checkpoint import save_heads
    from vllm_medusa.heads.config import HeadsConfig
    from vllm_medusa.heads.model import MedusaHeads

    for number, (hidden, vocab, named) in enumerate([(64, 160, "hidden_size"), (128, 999, "vocab_size")]):
        folder = tmp_path / str(number)
        save_heads(MedusaHeads(HeadsConfig(num_heads=2, num_layers=1, hidden_size=hidden, vocab_size=vocab)), folder)
        args = EngineArgs(
            model=str(tiny_model),
            skip_tokenizer_init=True,
            speculative_config={"method": "medusa", "model": str(folder)},
        )
        with pytest.raises(MedusaError, match=named):
            args.create_engine_config()


def test_flags_do_the_same_as_the_dict(tiny_model, tiny_heads):
    from vllm.engine.arg_utils import EngineArgs

    common = {"model": str(tiny_model), "skip_tokenizer_init": True, "max_model_len": 256}
    by_dict = EngineArgs(
        **common, speculative_config={"method": "medusa", "model": str(tiny_heads), "num_speculative_tokens": 9}
    )
    by_flag = EngineArgs(**common, spec_method="medusa", spec_model=str(tiny_heads), spec_tokens=9)
    configs = [args.create_engine_config() for args in (by_dict, by_flag, by_flag)]  # twice: nothing is used up
    assert configs[0].additional_config == configs[1].additional_config == configs[2].additional_config
    for config in configs:
        assert config.speculative_config.num_speculative_tokens == 9
        assert config.parallel_config.worker_cls.startswith("vllm_medusa.")
    assert by_dict.speculative_config["method"] == "medusa", "the user's own dict stays as it was"
