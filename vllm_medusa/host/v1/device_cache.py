"""The KV cache of a GPU engine on Model Runner V1: trees come from the host, as everything does there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.host.checked_rows import CheckedRows, part_of_step
from vllm_medusa.host.device_attention import ScatteredTrees
from vllm_medusa.host.device_layers import DeviceLayers


class ScatteredTreeCache(DeviceLayers):
    """Asked as a `TreeCache` is."""

    _slots: list[Tensor]  # of this step's tokens, by group

    def attach(self, by_layer: Mapping[str, Any], attn_groups: Sequence[Sequence[Any]], checked: CheckedRows) -> None:
        """Hang a step's trees on the host's attention metadata; arguments as of `TreeCache.attach`."""
        self._slots = []
        device = next(iter(by_layer.values())).block_table.device
        inputs = {
            "context_lens": checked.context.to(device),
            "query_start_loc": torch.nn.functional.pad(checked.counts.cumsum(0), (1, 0)).to(device),
            "ancestors": checked.ancestors.contiguous().to(device),
            "depths": checked.depths.to(device),
            "max_rows": int(checked.counts.max()),
            "max_context": int(checked.context.max()),
        }
        rows, requests = checked.rows.to(device), checked.requests.nonzero()[:, 0].to(device)
        for groups in attn_groups:
            for group in groups:
                metadata = by_layer[group.layer_names[0]]
                own = inputs | {"block_table": metadata.block_table[requests]}
                others = part_of_step(metadata, ~checked.requests, group.get_metadata_builder())
                metadata.trees = ScatteredTrees(rows, own, others)
            self._slots.append(metadata.slot_mapping)

    def commit(self, sources: Tensor, targets: Tensor) -> None:
        """Move accepted rows, as `TreeCache.commit` does."""
        moved = sources >= 0
        sources, targets = sources[moved], targets[moved]
        if len(sources) == 0:
            return
        for slots, movers in zip(self._slots, self.movers, strict=True):
            places, taken = (slots[which.to(slots.device)].to(torch.int64)[None] for which in (sources, targets))
            for mover in movers:
                mover.move(places, taken)
