"""Attention on the CPU for batches in which some requests check trees: tree rows to our kernel, the rest to the host's.

The layers of a Medusa engine adopt `TreeAttentionImpl` after the model is built. Registering a backend instead would
reach every engine of the process, since the host caches its choice of backend by shape and not by engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_medusa.attention.cpu import KeyLayout, TreeAttentionPlan, learn_layout
from vllm_medusa.attention.inputs import LayerInputs
from vllm_medusa.attention.native import SlotMover, load_kernel
from vllm_medusa.host.checked_rows import CheckedRows, part_of_step
from vllm_medusa.host.commit import TreeKeyValues
from vllm_medusa.host.layers import FLOAT8, decoder_layers


@dataclass
class TreeRows:
    """What the layers of one KV group need to know about a step's trees.

    Attributes:
        rows: int64 [T], indices of tree rows among the step's tokens; None if every token is one, in order.
        inputs: arguments of `TreeAttentionPlan` that all layers share.
        kept: where keys and values of tree rows wait for the commit; None where the commit moves them in the cache.
        others: int64 [U], indices of all other tokens, and the host's metadata for them.
    """

    rows: Tensor | None
    inputs: dict[str, Any]
    kept: TreeKeyValues | None
    others: tuple[Tensor, CPUAttentionMetadata] | None
    _plans: dict[tuple[float, float, int], TreeAttentionPlan] = field(default_factory=dict)

    def plan(self, impl: CPUAttentionBackendImpl) -> TreeAttentionPlan:
        """The plan for a layer's scale, soft cap and window; one for most models."""
        key = (impl.scale, float(impl.logits_soft_cap), impl.sliding_window)
        if key not in self._plans:
            self._plans[key] = TreeAttentionPlan(
                **self.inputs, scale=impl.scale, softcap=float(impl.logits_soft_cap), sliding_window=impl.sliding_window
            )
        return self._plans[key]


class TreeAttentionImpl(CPUAttentionBackendImpl):
    """The host's CPU attention, with our mask for rows that are tree nodes."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """As the host's: query [T, Hq, D], key and value [T, Hkv, D], output [T, Hq, D] is filled and returned."""
        trees: TreeRows | None = getattr(attn_metadata, "trees", None)
        if trees is None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if trees.kept is not None:
            trees.kept.keep(layer.layer_name, key, value, trees.rows)
        if trees.others is not None:
            rows, metadata = trees.others
            part = torch.empty_like(output[: len(rows)])
            super().forward(layer, query[rows], key[rows], value[rows], kv_cache, metadata, part)
            output[rows] = part
        caches, own = self.halves(kv_cache), self.own_inputs(layer)
        if trees.rows is None:
            trees.plan(self).run(query, *caches, output, own)
        else:
            part = torch.empty_like(output[: len(trees.rows)])
            trees.plan(self).run(query[trees.rows], *caches, part, own)
            output[trees.rows] = part
        return output

    def own_inputs(self, layer: Any) -> LayerInputs:
        """Sinks of this layer's heads, and the scales of its float8 cache."""
        sinks = None if self.sinks is None else self.sinks.float()
        if not self.is_fp8_kv_cache:
            return LayerInputs(sinks)
        return LayerInputs(sinks, layer._k_scale_float, layer._v_scale_float)

    def halves(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [blocks, Hkv, block, D] of a cache [blocks, Hkv, block, 2 D], whose blocks hold first all
        keys, then all values. Made once per layer: these views cost as much as a call of the kernel. Bytes are seen
        as the float8 that they are.
        """
        known: tuple[int, Tensor, Tensor] | None = getattr(self, "_known_halves", None)
        if known is None or known[0] != kv_cache.data_ptr():
            blocks, heads, block_size, _ = kv_cache.shape
            elements = kv_cache.view(FLOAT8[self.kv_cache_dtype]) if self.is_fp8_kv_cache else kv_cache
            keys, values = elements.view(blocks, heads, 2 * block_size, -1).chunk(2, dim=2)
            self._known_halves = known = (kv_cache.data_ptr(), keys, values)
        return known[1], known[2]


def adopt(layers: Iterable[Any]) -> list[Attention]:
    """Give every decoder attention layer of a model our implementation; returns these layers.

    Raises:
        MedusaError: a layer that cannot check trees.
    """
    adopted = decoder_layers(layers, (CPUAttentionBackendImpl,))
    for layer in adopted:
        layer.impl.__class__ = TreeAttentionImpl
    return adopted


def learn_key_layout(layer: Attention) -> KeyLayout:
    """How the host packs keys inside a block of this layer's cache, found by writing known ones."""
    block_size, head_size = layer.kv_cache.shape[2], layer.kv_cache.shape[3] // 2
    kind, stored = layer.impl.kv_cache_dtype, layer.kv_cache.dtype

    def write(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        halves = key_cache.view(stored), value_cache.view(stored)
        ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots, layer.isa, kv_cache_dtype=kind)

    return learn_layout(write, block_size, head_size, FLOAT8.get(kind, stored), layer.dtype)


def make_mover(layers: Sequence[Attention], layout: KeyLayout) -> SlotMover | None:
    """What moves tokens in the caches of one KV group's layers; None where the compiled kernel cannot."""
    owners = [layer for layer in layers if layer.kv_sharing_target_layer_name is None]
    kernel = load_kernel()
    caches = [layer.impl.halves(layer.kv_cache) for layer in owners]
    if kernel is None or not caches or not kernel.supports(caches[0][0].dtype, layout):
        return None
    if len({(keys.stride(), keys.dtype, values.stride()) for keys, values in caches}) > 1:
        return None
    return kernel.mover(layout, caches)


def attach_trees(
    metadata: CPUAttentionMetadata,
    checked: CheckedRows,
    kept: TreeKeyValues | None,
    layout: KeyLayout,
    builder: CPUAttentionMetadataBuilder,
) -> None:
    """Tell the layers of one KV group, through their metadata, which tokens are tree rows and what these may see."""
    everything = len(checked.rows) == metadata.num_actual_tokens
    inputs = {
        "block_table": metadata.block_table[: len(checked.requests)][checked.requests].contiguous(),
        "context_lens": checked.context,
        "query_start_loc": torch.nn.functional.pad(checked.counts.cumsum(0), (1, 0)),
        "ancestors": checked.ancestors,
        "depths": checked.depths,
        "layout": layout,
    }
    others = None if everything else part_of_step(metadata, ~checked.requests, builder)
    metadata.trees = TreeRows(None if everything else checked.rows, inputs, kept, others)
