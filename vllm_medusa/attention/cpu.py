"""Attention of tree rows on the CPU, over the host's paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from vllm_medusa.attention.gather import GatherPlan
from vllm_medusa.attention.inputs import PLAIN_LAYER, LayerInputs, TreeInputs
from vllm_medusa.attention.layout import KeyLayout, learn_layout
from vllm_medusa.attention.native import KernelPlan, load_kernel

__all__ = ["Kernel", "KeyLayout", "TreeAttentionPlan", "active_kernel", "learn_layout", "tree_attention"]

Kernel = Literal["c++", "gather"]


def active_kernel() -> Kernel:
    """What computes tree attention in this process."""
    return "gather" if load_kernel() is None else "c++"


@dataclass(frozen=True)
class TreeAttentionPlan(TreeInputs):
    """One step's tree attention: planned once, run by every layer.

    Attributes:
        kernel: what computes it; None takes the best that this machine has.
    """

    kernel: Kernel | None = None

    def run(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        out: Tensor,
        layer: LayerInputs = PLAIN_LAYER,
    ) -> Tensor:
        """Attention of one layer.

        Args:
            query: [T, Hq, D], the rows of all requests one after the other.
            key_cache, value_cache: [blocks, Hkv, block_size, D] as vLLM packs them, of the query's dtype or float8.
            out: [T, Hq, D], filled and returned.
            layer: its sinks and scales.
        """
        dtypes = query.dtype, key_cache.dtype
        plan = self._plans.get(dtypes)
        if plan is None:
            plan = self._plans[dtypes] = self._plan(*dtypes)
        plan.run(query, key_cache, value_cache, out, layer)
        return out

    @cached_property
    def _plans(self) -> dict[tuple[torch.dtype, torch.dtype], KernelPlan | GatherPlan]:
        return {}

    def _plan(self, *dtypes: torch.dtype) -> KernelPlan | GatherPlan:
        kernel = None if self.kernel == "gather" else load_kernel()
        if kernel is not None and all(kernel.supports(dtype, self.layout) for dtype in dtypes):
            return kernel.plan(self)
        if self.kernel == "c++":
            raise ValueError(f"kernel='c++': no compiled kernel for {dtypes} in this layout on this machine")
        return GatherPlan(self)


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    out: Tensor,
    layer: LayerInputs = PLAIN_LAYER,
    **inputs: Any,
) -> Tensor:
    """Plan and run in one call, for a single layer.

    Args:
        query, key_cache, value_cache, out, layer: see `TreeAttentionPlan.run`.
        inputs: the fields of `TreeAttentionPlan` by name.
    """
    return TreeAttentionPlan(**inputs).run(query, key_cache, value_cache, out, layer)
