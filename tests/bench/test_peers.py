"""What each method asks of vLLM."""

import pytest

from vllm_medusa.bench.engine import root_cause
from vllm_medusa.bench.peers import PEERS, choose_peers, peer_environment, shared_environment, speculative_config
from vllm_medusa.bench.run import Settings
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
        assert (environment.get("VLLM_PLUGINS") == "") is not peer.our_plugin


def test_engines_differ_in_speculation_only() -> None:
    settings = Settings("model", "heads", batch_sizes=(1, 4))
    engines = [settings.engine(peer) for peer in PEERS.values()]
    for engine in engines:
        engine.pop("speculative_config")
    assert all(engine == engines[0] for engine in engines)
    assert engines[0]["max_num_seqs"] == 4


def test_root_cause_is_the_first_exception() -> None:
    log = (
        "(EngineCore pid=12) ERROR 11-30 03:00:00 [core.py:1:] Traceback (most recent call last):\n"
        "(EngineCore pid=12) ERROR 11-30 03:00:00 [core.py:1]   File 'x.py'\n"
        "(EngineCore pid=12) ERROR 11-30 03:00:00 [core.py:1] my.errors.MedusaError: medusa: tree=[]: give one\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert root_cause(log) == "my.errors.MedusaError: medusa: tree=[]: give one"
    assert root_cause("INFO all is well") is None
