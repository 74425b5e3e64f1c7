"""Tree attention by gathering each request's keys and values: plain torch, right everywhere, slow on long texts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_medusa.attention.inputs import PLAIN_LAYER, LayerInputs, TreeInputs
from vllm_medusa.tree.topology import WORD_BITS


@dataclass(frozen=True)
class _Request:
    """One request's part of the step.

    Attributes:
        rows: its rows among the step's.
        blocks: int64 [n], the blocks that hold what its rows see.
        visible: bool [rows, L], which of the first L slots in these blocks each row sees.
    """

    rows: slice
    blocks: Tensor
    visible: Tensor


class GatherPlan:
    """Masks and blocks of a step, computed once for all layers."""

    def __init__(self, inputs: TreeInputs) -> None:
        """Plan a step."""
        self._inputs = inputs
        self._key_places = inputs.layout.keys.flatten()
        self._value_places = inputs.layout.values.flatten()
        starts = inputs.query_start_loc.tolist()
        contexts = inputs.context_lens.tolist()
        self._requests = [_request(inputs, r, starts[r], starts[r + 1], context) for r, context in enumerate(contexts)]

    def run(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        out: Tensor,
        layer: LayerInputs = PLAIN_LAYER,
    ) -> None:
        """As `TreeAttentionPlan.run`; everything is computed in float32."""
        scale = self._inputs.scale * layer.key_scale
        for request in self._requests:
            keys = _gather(key_cache, self._key_places, request)  # [Hkv, L, D]
            values = _gather(value_cache, self._value_places, request)
            rows = query[request.rows]
            heads = (len(rows), len(keys), -1, rows.shape[2])
            grouped = rows.float().reshape(heads).permute(1, 2, 0, 3)  # [Hkv, G, rows, D]
            scores = (grouped.flatten(1, 2) @ keys.mT).view(*grouped.shape[:3], -1).mul_(scale)
            if self._inputs.softcap > 0.0:
                scores = torch.tanh(scores / self._inputs.softcap) * self._inputs.softcap
            scores = scores.masked_fill_(~request.visible, -torch.inf)
            if layer.sinks is not None:
                sinks = layer.sinks.view(*grouped.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
                weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
            else:
                weights = scores.softmax(-1)
            result = (weights.flatten(1, 2) @ values).view_as(grouped) * layer.value_scale
            out[request.rows] = result.permute(2, 0, 1, 3).reshape(rows.shape).to(out.dtype)


def _request(inputs: TreeInputs, request: int, begin: int, end: int, context: int) -> _Request:
    rows = slice(begin, end)
    count = end - begin
    block_size = inputs.layout.block_size
    depths = inputs.depths[rows]
    first_block = 0
    if inputs.sliding_window > 0:  # the root looks back furthest
        first_block = max(0, context - inputs.sliding_window + 1) // block_size
    blocks = inputs.block_table[request, first_block : -(-(context + count) // block_size)].to(torch.int64)
    positions = torch.cat([torch.arange(first_block * block_size, context), context + depths])  # of the slots
    nodes = torch.arange(count - 1)
    words = inputs.ancestors[rows][:, nodes // WORD_BITS]
    visible = torch.ones(count, len(positions), dtype=torch.bool)
    visible[:, len(positions) - len(nodes) :] = (words >> (nodes % WORD_BITS)) & 1 == 1
    if inputs.sliding_window > 0:
        visible &= context + depths[:, None] - positions < inputs.sliding_window
    return _Request(rows, blocks, visible)


def _gather(cache: Tensor, places: Tensor, request: _Request) -> Tensor:
    """float32 [Hkv, L, D], keys or values of the slots that the request's mask speaks of."""
    as_bytes = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache  # float8 cannot be gathered
    packed = as_bytes[request.blocks]  # [n, Hkv, block_size, D], elements where vLLM packs them
    blocks = packed.flatten(2).index_select(2, places).view(packed.shape).view(cache.dtype)
    slots: Tensor = blocks.transpose(0, 1).flatten(1, 2)[:, : request.visible.shape[1]]
    return slots.float()
