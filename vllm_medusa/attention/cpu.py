"""Attention of tree rows on the CPU, over the host's paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from vllm_medusa.attention.gather import GatherPlan
from vllm_medusa.attention.inputs import TreeInputs
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

    def run(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, out: Tensor) -> Tensor:
        """Attention of one layer.

        Args:
            query: [T, Hq, D], the rows of all requests one after the other.
            key_cache, value_cache: [blocks, Hkv, block_size, D] as the host packs them.
            out: [T, Hq, D], filled and returned.
        """
        plan = self._plans.get(query.dtype)
        if plan is None:
            plan = self._plans[query.dtype] = self._plan(query.dtype)
        plan.run(query, key_cache, value_cache, out)
        return out

    @cached_property
    def _plans(self) -> dict[torch.dtype, KernelPlan | GatherPlan]:
        return {}

    def _plan(self, dtype: torch.dtype) -> KernelPlan | GatherPlan:
        kernel = None if self.kernel == "gather" else load_kernel()
        if kernel is not None and kernel.supports(dtype, self.layout):
            return kernel.plan(self)
        if self.kernel == "c++":
            raise ValueError(f"kernel='c++': no compiled kernel for {dtype} in this layout on this machine")
        return GatherPlan(self)


def tree_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, *, out: Tensor, **inputs: Any) -> Tensor:
    """Plan and run in one call, for a single layer.

    Args:
        query, key_cache, value_cache, out: see `TreeAttentionPlan.run`.
        inputs: the fields of `TreeAttentionPlan` by name.
    """
    return TreeAttentionPlan(**inputs).run(query, key_cache, value_cache, out)
