"""The commit: the accepted path goes to the cache slots that plain decoding would have filled.

With the compiled kernel what lies in the cache is moved. Without it, or where it does not know the cache's packing,
tree rows are kept as the layers handed them over, and the host's own writer puts the accepted ones in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_medusa.host.trees import StepTrees

Ints = npt.NDArray[np.int64]


class TreeKeyValues:
    """Keys and values of one step's tree rows, by layer, until the walk has chosen among them.

    It is independent of how the host lays out its cache: what is kept is what the layer handed to the cache, and the
    host's own writer puts it there again. Buffers are reused from step to step.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        """`layers`: the target's attention layers that own a cache."""
        self._layers = [layer for layer in layers if layer.kv_sharing_target_layer_name is None]
        self._index = {layer.layer_name: i for i, layer in enumerate(self._layers)}
        self._keys: list[Tensor] = [torch.empty(0)] * len(self._layers)
        self._values: list[Tensor] = [torch.empty(0)] * len(self._layers)

    def keep(self, layer_name: str, key: Tensor, value: Tensor, rows: Tensor | None) -> None:
        """Copy the tree rows' keys and values [T, Hkv, D] of one layer; `rows` None means all."""
        index = self._index.get(layer_name)
        if index is None:
            return
        self._keys[index] = _copy(self._keys[index], key, rows)
        self._values[index] = _copy(self._values[index], value, rows)

    def write(self, sources: Tensor, slots: dict[str, Tensor]) -> None:
        """Write kept rows to slots, all layers.

        Args:
            sources: int64 [M], indices among the kept rows, which are the step's tree rows in order.
            slots: int64 [M] by layer name, where they belong.
        """
        for layer, keys, values in zip(self._layers, self._keys, self._values, strict=True):
            layer.impl.do_kv_cache_update(
                layer, keys[sources], values[sources], layer.kv_cache, slots[layer.layer_name]
            )


def find_moves(step: StepTrees, paths: Ints) -> tuple[Ints, Ints]:
    """Accepted rows that are not where they belong.

    Args:
        step: the step's trees.
        paths: int64 [R, D + 1], accepted rows, row 0 first, padded with -1.

    Returns:
        int64 [M] and int64 [M], indices among the step's tokens: of the rows, and of those whose slots they take;
        request by request, shallow ones first, so that no row is overwritten before it has moved.

    Row 4 (below row 1) was accepted, so it moves to the slot of row 2:

    >>> from vllm_medusa.host.trees import DraftBook, lay_trees
    >>> one = np.array([5])
    >>> step = lay_trees(["a"], {"a": [7, 8, 9, 7]}, DraftBook(), one, np.array([20]), np.array([21]))
    >>> step.parents[0] = [0, 1, 0, 1]
    >>> [found.tolist() for found in find_moves(step, np.array([[0, 1, 4]]))]
    [[4], [2]]
    """
    place = np.arange(paths.shape[1])
    request, depth = np.nonzero((paths != place) & (paths >= 0) & step.is_tree[:, None])
    first = step.first_token[request]
    return first + paths[request, depth], first + depth


def _copy(buffer: Tensor, source: Tensor, rows: Tensor | None) -> Tensor:
    count = source.shape[0] if rows is None else len(rows)
    if len(buffer) < count or buffer.dtype != source.dtype:
        buffer = torch.empty((max(count, 2 * len(buffer)), *source.shape[1:]), dtype=source.dtype, device=source.device)
    if rows is None:
        buffer[:count].copy_(source)
    else:
        torch.index_select(source, 0, rows, out=buffer[:count])
    return buffer
