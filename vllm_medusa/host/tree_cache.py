"""The KV cache of an engine whose layers check trees: what they may see, and the commit of what was accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.attention.cpu import KeyLayout, active_kernel
from vllm_medusa.attention.native import SlotMover
from vllm_medusa.host.backend import adopt, attach_trees, learn_key_layout, make_mover
from vllm_medusa.host.checked_rows import CheckedRows
from vllm_medusa.host.commit import TreeKeyValues


class TreeCache:
    """The attention layers of a CPU engine by KV cache group; the same for both model runners.

    Attributes:
        kernel: what attends.
    """

    def __init__(self, layers: Mapping[str, Any], kv_cache_config: Any) -> None:
        """Adopt the layers, once they have their caches, and learn how keys lie in a block.

        Args:
            layers: the host's `static_forward_context`.
            kv_cache_config: the host's, with a list of layer names per group.
        """
        adopted = adopt(layers.values())
        self.kernel = active_kernel()
        self._names: list[list[str]] = [list(group.layer_names) for group in kv_cache_config.kv_cache_groups]
        groups = [[layers[name] for name in names] for names in self._names]
        self.layouts: list[KeyLayout] = [learn_key_layout(group[0]) for group in groups]
        self.movers: list[SlotMover | None] = [
            make_mover(group, layout) for group, layout in zip(groups, self.layouts, strict=True)
        ]
        self.kept = None if all(self.movers) else TreeKeyValues(adopted)
        self._slots: list[Tensor] = []  # of this step's tokens, by group
        self._checked: CheckedRows | None = None

    def attach(self, by_layer: Mapping[str, Any], attn_groups: Sequence[Sequence[Any]], checked: CheckedRows) -> None:
        """Hang a step's trees on the host's attention metadata.

        Args:
            by_layer: the host's metadata by layer name; layers of one attention group share one.
            attn_groups: the host's attention groups by KV cache group.
            checked: the rows that check trees.
        """
        self._checked, self._slots = checked, []
        for layout, groups in zip(self.layouts, attn_groups, strict=True):
            for group in groups:
                metadata = by_layer[group.layer_names[0]]
                attach_trees(metadata, checked, self.kept, layout, group.get_metadata_builder())
            self._slots.append(metadata.slot_mapping)

    def commit(self, sources: Tensor, targets: Tensor) -> None:
        """Move accepted rows to the slots that plain decoding would have filled, in all layers.

        In the step that checked them: the next one, or the prefix cache, may read these slots.

        Args:
            sources, targets: int64 [M] or [R, M], indices among the step's tokens: the rows, and those whose slots
                they take; of each request shallow ones first. A source of -1 is nothing to move.
        """
        moved = sources >= 0
        sources, targets = sources[moved], targets[moved]
        if len(sources) == 0:
            return
        if self.kept is None:
            for mover, slots in zip(self.movers, self._slots, strict=True):
                assert mover is not None
                mover.move(slots[sources], slots[targets])
            return
        assert self._checked is not None
        by_layer: dict[str, Tensor] = {}
        for slots, names in zip(self._slots, self._names, strict=True):
            by_layer |= dict.fromkeys(names, slots[targets])
        self.kept.write(torch.searchsorted(self._checked.rows, sources), by_layer)
