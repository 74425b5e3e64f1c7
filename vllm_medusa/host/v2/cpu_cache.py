"""The KV cache of a CPU engine on Model Runner V2: its trees in the form that attention on a CPU wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm_medusa.host.checked_rows import CheckedRows
from vllm_medusa.host.tree_cache import TreeCache
from vllm_medusa.host.v2.slots import StepTrees


class CpuTreeCache:
    """A `TreeCache` that is asked as a `DeviceTreeCache` is; on a CPU values may be read.

    Attributes:
        kernel: what attends.
    """

    def __init__(self, layers: Mapping[str, Any], kv_cache_config: Any) -> None:
        """Adopt the layers; arguments as of `TreeCache`."""
        self._cache = TreeCache(layers, kv_cache_config)
        self.kernel = self._cache.kernel

    def attach(
        self,
        by_layer: Mapping[str, Any],
        batch: Any,
        attn_groups: Sequence[Sequence[Any]],
        *args: Any,
        step: StepTrees | None,
        for_capture: bool,
    ) -> None:
        """Hang a step's trees on the host's attention metadata; arguments as of `DeviceTreeCache.attach`."""
        if step is None or step.batch is not batch:
            return
        which = step.num_nodes > 0
        on_row = torch.arange(step.width + 1) <= step.num_nodes[which][:, None]
        rows = step.first_token[which][:, None] + torch.arange(step.width + 1)
        checked = CheckedRows(
            requests=which,
            rows=rows[on_row],
            context=step.context[which],
            counts=step.num_nodes[which] + 1,
            ancestors=step.ancestors[which][on_row],
            depths=step.depths[which][on_row],
        )
        if len(checked.rows):
            self._cache.attach(by_layer, attn_groups, checked)

    def commit(self, step: StepTrees) -> None:
        """Move accepted rows to the slots that plain decoding would have filled."""
        self._cache.commit(*step.moves())
