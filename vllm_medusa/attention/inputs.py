"""What the rows of one step's trees may see, and what differs from layer to layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vllm_medusa.attention.layout import KeyLayout


@dataclass(frozen=True)
class TreeInputs:
    """Everything about a step's attention that the layers of a model share.

    R requests, T rows in all. The rows' own keys and values are in the cache already, row r of a request with P
    cached tokens at slot position P + r. Row r sees the prefix, the root, itself and its ancestors.

    Attributes:
        block_table: int32 [R, blocks], the blocks of each request in order.
        context_lens: int64 [R], tokens in the cache before this step (P).
        query_start_loc: int64 [R + 1], where each request's rows begin.
        ancestors: int64 [T, W], bit i = node i is the row or an ancestor (uint64 words seen as int64).
        depths: int64 [T], of each row; its logical position is P + depth.
        layout: how the cache is packed.
        scale: what dot products are multiplied by.
        softcap: scores become softcap * tanh(score / softcap); 0 leaves them.
        sliding_window: a row sees only keys whose logical position is above its own minus this; -1: all.
    """

    block_table: Tensor
    context_lens: Tensor
    query_start_loc: Tensor
    ancestors: Tensor
    depths: Tensor
    layout: KeyLayout
    scale: float
    softcap: float = 0.0
    sliding_window: int = -1


@dataclass(frozen=True)
class LayerInputs:
    """What one layer has of its own.

    Attributes:
        sinks: float32 [Hq] or None: a score for each head that no key has. It takes its share of the softmax and draws
            no value. Neither scale nor soft cap applies to it.
        key_scale, value_scale: what elements of a float8 cache are multiplied by.
    """

    sinks: Tensor | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0


PLAIN_LAYER = LayerInputs()
