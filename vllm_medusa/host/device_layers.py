"""The attention layers of a GPU engine by KV cache group, and what moves tokens in their caches: for both runners."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from vllm_medusa.attention.triton_mover import SlotMover
from vllm_medusa.host.device_attention import adopt, make_movers, warm_up


class DeviceLayers:
    """Adopted layers. What a step's rows may see is hung on the host's metadata by those that derive from this.

    Attributes:
        kernel: what attends.
    """

    kernel = "triton"

    def __init__(self, layers: Mapping[str, Any], kv_cache_config: Any) -> None:
        """Adopt the layers; arguments as of `TreeCache`."""
        self._layers = adopt(layers.values())
        names = {layer.layer_name for layer in self._layers if layer.kv_sharing_target_layer_name is None}
        self._owners = [
            [layers[name] for name in group.layer_names if name in names] for group in kv_cache_config.kv_cache_groups
        ]

    @cached_property
    def movers(self) -> list[list[SlotMover]]:
        """By group. Made when first needed: the host throws away the caches with which it measures its memory."""
        return [make_movers(owners) for owners in self._owners]

    def warm_up(self, num_nodes: int) -> None:
        """See `device_attention.warm_up`."""
        warm_up(self._layers, num_nodes)
