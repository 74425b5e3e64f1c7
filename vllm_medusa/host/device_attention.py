"""Attention on a GPU for batches in which some requests check trees: tree rows to our kernel, the rest to the host's.

As on a CPU (backend.py) the layers of a Medusa engine adopt a subclass of the implementation that the host chose for
them: FlashAttention or Triton. The host's choice stays its own, and other engines of the process know nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from vllm_medusa.attention.triton import SPLITS, Tiles, tree_attention
from vllm_medusa.attention.triton_check import check_kernels
from vllm_medusa.attention.triton_mover import SlotMover
from vllm_medusa.errors import MedusaError
from vllm_medusa.host.layers import FLOAT8, decoder_layers
from vllm_medusa.tree.topology import num_words

HOSTS_OWN = (FlashAttentionImpl, TritonAttentionImpl)


@dataclass(frozen=True)
class LeadingTrees:
    """What the layers of one attention group need to know about a step whose first requests check trees.

    Attributes:
        num_rows: tokens of these requests, the first of the step.
        inputs: arguments of `tree_attention` that all layers share.
        others: the host's metadata for the requests behind them; None if there are none.
    """

    num_rows: int
    inputs: dict[str, Any]
    others: Any = None


@dataclass(frozen=True)
class ScatteredTrees:
    """The same where requests that check trees stand between others (Model Runner V1).

    Attributes:
        rows: int64 [T], of trees among the step's tokens.
        inputs: as above.
        others: int64 [U], all other tokens, and the host's metadata for them; None if there are none.
    """

    rows: Tensor
    inputs: dict[str, Any]
    others: tuple[Tensor, Any] | None = None


@cache
def with_trees(host: Any) -> Any:
    """A subclass of the host's attention, with our mask for rows that are tree nodes."""

    class DeviceTreeAttentionImpl(host):
        """Where rows of trees come first in a step each part is a slice; else it is gathered."""

        checks_trees = True

        def forward(
            self,
            layer: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            attn_metadata: Any,
            output: Tensor,
            output_scale: Tensor | None = None,
            output_block_scale: Tensor | None = None,
        ) -> Tensor:
            """As the host's: query [T, Hq, D], key and value [T, Hkv, D], output [T, Hq, D] is filled and returned."""
            trees: LeadingTrees | ScatteredTrees | None = getattr(attn_metadata, "trees", None)
            scales = (output_scale, output_block_scale)
            if trees is None:
                return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
            if isinstance(trees, ScatteredTrees):
                if trees.others is not None:
                    rows, metadata = trees.others
                    part = torch.empty_like(output[: len(rows)])
                    super().forward(layer, query[rows], key[rows], value[rows], kv_cache, metadata, part, *scales)
                    output[rows] = part
                part = torch.empty_like(output[: len(trees.rows)])
                attend(layer, query[trees.rows], kv_cache, part, trees.inputs)
                output[trees.rows] = part
                return output
            n = trees.num_rows
            if trees.others is not None:
                super().forward(layer, query[n:], key[n:], value[n:], kv_cache, trees.others, output[n:], *scales)
            attend(layer, query[:n], kv_cache, output[:n], trees.inputs)
            return output

        def fused_output_quant_supported(self, quant_key: Any) -> bool:
            """Our kernel writes what the model computes in."""
            return False

    return DeviceTreeAttentionImpl


def attend(layer: Any, query: Tensor, kv_cache: Tensor, output: Tensor, inputs: dict[str, Any]) -> None:
    """Attention of tree rows alone, query [T, Hq, D], by a layer's own scale, soft cap, window, sinks and float8."""
    impl = layer.impl
    if impl.kv_cache_dtype in FLOAT8:
        kv_cache = kv_cache.view(current_platform.fp8_dtype())  # as the host reads it
        inputs = inputs | {"key_scale": layer._k_scale, "value_scale": layer._v_scale}
        if query.dtype != output.dtype:  # the host's kernel wants it in float8 too
            query = query.to(output.dtype) * layer._q_scale.to(output.dtype)
    keys, values = kv_cache.split(impl.head_size, dim=-1)
    tree_attention(
        query,
        keys,
        values,
        output,
        **inputs,
        scale=impl.scale,
        softcap=float(impl.logits_soft_cap),
        sliding_window=window_of(impl),
        sinks=impl.sinks,
    )


def window_of(impl: Any) -> int:
    """Keys that a row of this layer sees, itself included; -1: all. The host says how many lie before it."""
    before = -1 if impl.sliding_window is None else int(impl.sliding_window[0])
    return before + 1 if before >= 0 else -1


def adopt(layers: Iterable[Any]) -> list[Any]:
    """Give every decoder attention layer of a model our implementation; returns these layers.

    Raises:
        MedusaError: a layer that cannot check trees, or a host's attention that cannot share its cache with our kernel.
    """
    layers = list(layers)
    for layer in layers:
        backend = getattr(layer, "attn_backend", None)
        if backend is not None and not isinstance(layer.impl, HOSTS_OWN):
            fix = "tree rows share a cache with FLASH_ATTN or TRITON_ATTN; set attention_backend to one of them"
            raise MedusaError.of("attention_backend", backend.get_name(), fix)
    adopted = decoder_layers(layers, HOSTS_OWN)
    for layer in adopted:
        if not getattr(layer.impl, "checks_trees", False):
            host: Any = type(layer.impl)
            layer.impl.__class__ = with_trees(host)
    return adopted


def make_movers(layers: Sequence[Any]) -> list[SlotMover]:
    """One mover for all layers whose caches are laid out alike."""
    alike: dict[Any, list[Tensor]] = {}
    for layer in layers:
        cache = layer.kv_cache
        alike.setdefault((cache.shape, cache.stride(), cache.dtype), []).append(cache)
    return [SlotMover(caches) for caches in alike.values()]


def warm_up(layers: Sequence[Any], num_nodes: int) -> None:
    """Compile what trees of up to `num_nodes` nodes may need: the host compiles nothing while it serves.

    Args:
        layers: as adopted, with their caches.
        num_nodes: N.

    Raises:
        MedusaError: on this device our kernels give other results than arithmetic does.
    """
    kinds = {
        (layer.num_heads, layer.head_size, layer.impl.sliding_window, layer.impl.kv_cache_dtype): layer
        for layer in layers
    }
    for layer in kinds.values():
        cache, dtype = layer.kv_cache, layer.dtype
        check_kernels(
            cache.device,
            dtype,
            heads=layer.num_heads,
            kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            block_size=cache.shape[2],
            num_nodes=num_nodes,
            sliding_window=window_of(layer.impl),
            softcap=float(layer.impl.logits_soft_cap),
            sinks=layer.impl.sinks is not None,
            stored=current_platform.fp8_dtype() if layer.impl.kv_cache_dtype in FLOAT8 else None,
        )
        integers = torch.zeros(2, 2, dtype=torch.int64, device=cache.device)
        inputs = {
            "block_table": torch.zeros(1, 1, dtype=torch.int32, device=cache.device),
            "context_lens": integers[0, :1],
            "query_start_loc": integers[1].to(torch.int32),  # one request without rows
            "ancestors": integers[:1, : num_words(num_nodes)],
            "depths": integers[0, :1],
            "max_context": 0,
            "max_rows": 1,
        }
        query = torch.zeros(1, layer.num_heads, layer.head_size, dtype=dtype, device=cache.device)
        packed = [rows * layer.num_heads // layer.num_kv_heads for rows in range(2, num_nodes + 2)]
        tiles = {Tiles.choose(rows, layer.head_size, dtype.itemsize) for rows in packed}
        for tile, splits in product(tiles, SPLITS):
            attend(layer, query, cache, torch.empty_like(query), inputs | {"tiles": tile, "splits": splits})
