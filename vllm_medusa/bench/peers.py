"""The methods a bench compares: what each one asks of vLLM, and the environment that all of them share."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_medusa.errors import MedusaError
from vllm_medusa.quota import usable_cores

BASELINE = "none"
COMMAND_PLUGIN = "medusa_wheel_name"  # without it the CPU wheel's `vllm serve` cannot start; it does nothing else


@dataclass(frozen=True)
class Peer:
    """One method of decoding.

    `speculative_config` is what vLLM gets; with `uses_heads` the heads' folder is added as its "model".
    `exports_heads`: the heads are first written in vLLM's own Medusa format. `our_plugin`: whether our plugin may load.
    `is_tree`: whether `num_speculative_tokens` and `adaptive` (the user's tree settings) apply.
    """

    name: str
    speculative_config: Mapping[str, Any] | None
    uses_heads: bool = False
    exports_heads: bool = False
    our_plugin: bool = True
    is_tree: bool = False


PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(BASELINE, None),
        Peer("medusa", {"method": "medusa", "tree": "dynamic"}, uses_heads=True, is_tree=True),
        Peer("medusa-static", {"method": "medusa", "tree": "static"}, uses_heads=True, is_tree=True),
        Peer("medusa-chain", {"method": "medusa", "tree": "chain"}, uses_heads=True),
        Peer("native-chain", {"method": "medusa"}, uses_heads=True, exports_heads=True, our_plugin=False),
        Peer(
            "ngram",
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        ),
    )
}


def choose_peers(names: Sequence[str]) -> list[Peer]:
    """The peers of these names, the baseline first; it is added when missing, for every ratio needs it.

    >>> [peer.name for peer in choose_peers(["medusa", "ngram"])]
    ['none', 'medusa', 'ngram']
    """
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise MedusaError.of("methods", unknown[0], f"choose from {', '.join(PEERS)}")
    return [PEERS[name] for name in dict.fromkeys([BASELINE, *names])]


def speculative_config(
    peer: Peer, heads: str | None, num_speculative_tokens: int | None = None, adaptive: bool | None = None
) -> dict[str, Any] | None:
    """The dict for `LLM(speculative_config=...)`, or None for the baseline.

    >>> speculative_config(PEERS["medusa"], "my-heads", num_speculative_tokens=8)
    {'method': 'medusa', 'tree': 'dynamic', 'model': 'my-heads', 'num_speculative_tokens': 8}
    """
    if peer.speculative_config is None:
        return None
    config = dict(peer.speculative_config)
    if peer.uses_heads:
        if heads is None:
            raise MedusaError.of("heads", heads, f"method {peer.name!r} needs Medusa heads: give their folder")
        config["model"] = heads
    if peer.is_tree and num_speculative_tokens is not None:
        config["num_speculative_tokens"] = num_speculative_tokens
    if peer.is_tree and adaptive is not None:
        config["adaptive"] = adaptive
    return config


def has_report(speculative_config: Mapping[str, Any] | None) -> bool:
    """Whether an engine with this setting answers `medusa_report`: ours does, vLLM's own Medusa knows no `tree`.

    >>> has_report({"method": "medusa", "tree": "chain"}), has_report({"method": "medusa"}), has_report(None)
    (True, False, False)
    """
    return speculative_config is not None and "tree" in speculative_config


def shared_environment(user: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Thread and memory settings, the same for every method; whatever the user has set stays.

    vLLM's default binding keeps a core for its front end: on two cores that leaves the model a single thread, which
    makes every method look memory-bound in a way nobody deploys. So threads are not bound and all cores compute, or as
    many as a container's quota is worth.
    """
    defaults = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(usable_cores()),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_USE_AOT_COMPILE": "0",  # vLLM 0.32 cannot load what it saved on a CPU: every start would compile again
    }
    return {name: user.get(name, value) for name, value in defaults.items()}


def peer_environment(peer: Peer, user: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The whole environment of the process that runs this peer's engine."""
    environment = {**user, **shared_environment(user)}
    if not peer.our_plugin:
        environment["VLLM_PLUGINS"] = COMMAND_PLUGIN  # an allow-list: no general plugin loads
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    return environment
