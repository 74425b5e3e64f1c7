"""What each method asks of vLLM."""

import json
from itertools import pairwise

import pytest

from vllm_medusa.bench.peers import PEERS, choose_peers, peer_environment, shared_environment, speculative_config
from vllm_medusa.bench.run import Settings
from vllm_medusa.bench.serving import serve_arguments
from vllm_medusa.errors import MedusaError


def test_baseline_comes_first_and_once() -> None:
    assert [peer.name for peer in choose_peers(["ngram", "none", "ngram"])] == ["none", "ngram"]


def test_unknown_method() -> None:
    with pytest.raises(MedusaError, match=r"methods='eagle': choose from none, medusa"):
        choose_peers(["eagle"])


def test_tree_settings_reach_trees_only() -> None:
    given = {"num_speculative_tokens": 12, "adaptive": False}
    tree = speculative_config(PEERS["medusa-static"], "heads", **given)
    assert tree == {"method": "medusa", "tree": "static", "model": "heads", **given}
    assert speculative_config(PEERS["ngram"], None, **given) == dict(PEERS["ngram"].speculative_config or {})
    assert speculative_config(PEERS["none"], "heads", **given) is None


def test_heads_are_asked_for() -> None:
    with pytest.raises(MedusaError, match="heads=None"):
        speculative_config(PEERS["medusa"], None)


def test_threads_are_the_same_for_all_and_the_users_win() -> None:
    user = {"OMP_NUM_THREADS": "7", "PATH": "/bin"}
    shared = shared_environment(user)
    assert shared["OMP_NUM_THREADS"] == "7"
    assert shared["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    for peer in PEERS.values():
        environment = peer_environment(peer, user)
        assert shared.items() <= environment.items()
        assert environment["PATH"] == "/bin"
        # The plugin that only lets `vllm serve` start changes nothing in how it serves.
        assert (environment.get("VLLM_PLUGINS") == "medusa_wheel_name") is not peer.our_plugin


def test_engines_differ_in_speculation_only() -> None:
    settings = Settings("model", "heads", batch_sizes=(1, 4))
    engines = [settings.engine(peer) for peer in PEERS.values()]
    for engine in engines:
        engine.pop("speculative_config")
    assert all(engine == engines[0] for engine in engines)
    assert engines[0]["max_num_seqs"] == 4


def test_servers_get_the_same_settings() -> None:
    settings = Settings("my-model", "my-heads", batch_sizes=(1, 4), dtype="float32", enforce_eager=True, server=True)
    arguments = serve_arguments(settings.engine(PEERS["medusa"]), 8123)
    assert arguments[:2] == ["serve", "my-model"]
    given = dict(pairwise(arguments))
    assert given["--port"] == "8123"
    assert given["--dtype"] == "float32"
    assert given["--max-num-seqs"] == "4"
    assert given["--generation-config"] == "vllm"  # offline, the model's own defaults do not count either
    assert json.loads(given["--speculative-config"]) == {"method": "medusa", "tree": "dynamic", "model": "my-heads"}
    assert "--enforce-eager" in arguments and "--no-enable-prefix-caching" in arguments
    assert "--speculative-config" not in serve_arguments(settings.engine(PEERS["none"]), 8123)
