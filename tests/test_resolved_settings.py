"""Settings with everything looked up: what travels to the workers, for each way to name a tree."""

from pathlib import Path

import pytest

from vllm_medusa.config import MedusaConfig, Settings, rank_accuracy_of, resolve, typical_rank_accuracy
from vllm_medusa.defaults import bundled_heads
from vllm_medusa.heads.checkpoint import read_config
from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.tree.choices import PRESETS, to_choices


def settled(**given: object) -> Settings:
    config, _ = MedusaConfig.parse({"model": "heads", **given})
    return resolve(config, "folder", num_heads=4, top_k=10, rank_accuracy=None, default_nodes=16)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_nodes_that_they_name(name: str) -> None:
    tree = settled(tree=name).fixed_tree
    assert tree is not None
    assert sorted(to_choices(tree)) == sorted(map(list, PRESETS[name]))
    assert settled(tree=name, num_speculative_tokens=3).fixed_tree == tree.prefix(3)


def test_settings_travel_as_json() -> None:
    for given in ({"tree": "static"}, {"tree": [[0], [1], [0, 0]]}, {"num_speculative_tokens": 5, "adaptive": False}):
        settings = settled(**given)
        assert Settings(**settings.model_dump(mode="json")) == settings


def test_a_path_and_no_number_are_fine() -> None:
    config, rest = MedusaConfig.parse({"model": Path("some/heads"), "num_speculative_tokens": None})
    assert (config.model, config.num_speculative_tokens, rest) == (str(Path("some/heads")), None, {})


def test_lookup_is_for_trees_that_grow() -> None:
    assert settled().prompt_lookup and not settled(prompt_lookup=False).prompt_lookup
    assert not settled(tree="static").prompt_lookup


def test_heads_without_calibration_get_a_typical_table() -> None:
    bare = HeadsConfig(num_heads=3, num_layers=1, hidden_size=8, vocab_size=50, top_k=12)
    table = rank_accuracy_of(bare)
    assert table == typical_rank_accuracy(3, 12) and [len(row) for row in table] == [12] * 3
    assert all(0.0 < sum(row) < 1.0 for row in table), "no more right than always"
    for row in table:
        assert row == sorted(row, reverse=True)
    calibrated = read_config(bundled_heads())
    assert calibrated.calibration is not None
    assert rank_accuracy_of(calibrated) == calibrated.calibration.rank_accuracy
