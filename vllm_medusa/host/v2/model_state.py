"""The host's model state with trees: what surrounds the forward pass of a step on Model Runner V2."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.host.backend import CheckedRows
from vllm_medusa.host.tree_cache import TreeCache
from vllm_medusa.host.v2.clock import StageClock
from vllm_medusa.host.v2.counting import DeviceCounts
from vllm_medusa.host.v2.sampling import TreeSampler
from vllm_medusa.host.v2.slots import SlotTrees, StepTrees


@cache
def with_trees(host: Any) -> Any:
    """A subclass of the host's model state; `trees` is set on the instance before its first step."""

    class TreeModelState(host):
        """The host's hooks around a forward pass, in the order of a step."""

        trees: SlotTrees
        counts: DeviceCounts | None = None  # set when warm-up is over
        clock: StageClock[Any]
        tree_cache: TreeCache | None = None
        batch: Any = None  # that runs now

        def add_request(self, req_index: int, new_req_data: Any) -> None:
            """A slot is used anew."""
            super().add_request(req_index, new_req_data)
            self.trees.clear(req_index)

        def initialize_kv_cache(self, kv_cache_config: Any, block_tables: Any) -> None:
            """Once layers have their caches."""
            super().initialize_kv_cache(kv_cache_config, block_tables)
            layers = self.vllm_config.compilation_config.static_forward_context
            self.tree_cache = TreeCache(layers, kv_cache_config)

        def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
            """The host's sampler for steps without trees, the walk for the others."""
            return sampler, TreeSampler(sampler, self.trees, self.clock)

        def preprocess_state(self, input_batch: Any, *args: Any, **kwargs: Any) -> None:
            """Slots are known, attention metadata is not built yet: lay the trees over the batch."""
            super().preprocess_state(input_batch, *args, **kwargs)
            self.clock.begin()
            self.trees.lay(input_batch)
            self.batch = input_batch

        def prepare_attn(
            self,
            input_batch: Any,
            cudagraph_mode: Any,
            block_tables: Any,
            slot_mappings: Any,
            attn_groups: Any,
            *args: Any,
            **kwargs: Any,
        ) -> dict[str, Any]:
            """Hang the trees on the host's metadata. Dry runs, which nothing lays trees over, stay causal."""
            by_layer: dict[str, Any] = super().prepare_attn(
                input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, *args, **kwargs
            )
            step = self.trees.step
            if step is not None and step.batch is input_batch:
                checked = _checked_rows(step)
                if len(checked.rows):
                    assert self.tree_cache is not None
                    self.tree_cache.attach(by_layer, attn_groups, checked)
            return by_layer

        def postprocess_state(self, *args: Any, **kwargs: Any) -> None:
            """The commit, on the stream that ran the step and will run the next."""
            super().postprocess_state(*args, **kwargs)
            step = self.trees.step
            self.clock.mark("forward" if step is None else "walk")  # the host's own sampler is no stage of its own
            if step is not None and step.walk is not None:
                assert self.tree_cache is not None
                self.tree_cache.commit(*_moves(step))
            if self.counts is not None:
                self.counts.count(self.batch, step)
            self.clock.mark("commit")

    return TreeModelState


def _checked_rows(step: StepTrees) -> CheckedRows:
    """The rows of requests that have nodes, as attention on the CPU wants them; this reads values."""
    which = step.num_nodes > 0
    on_row = torch.arange(step.width + 1) <= step.num_nodes[which][:, None]
    rows = step.first_token[which][:, None] + torch.arange(step.width + 1)
    return CheckedRows(
        requests=which,
        rows=rows[on_row],
        context=step.context[which],
        counts=step.num_nodes[which] + 1,
        ancestors=step.ancestors[which][on_row],
        depths=step.depths[which][on_row],
    )


def _moves(step: StepTrees) -> tuple[Tensor, Tensor]:
    """Sources and targets int64 [R, D] among the step's tokens, by depth; where nothing moves both are the same."""
    assert step.walk is not None
    path = step.walk.rows[:, 1:]
    depth = torch.arange(1, path.shape[1] + 1, device=path.device)
    accepted = path >= 0
    first = step.first_token[:, None]
    return first + path.where(accepted, 0), first + depth.where(accepted, 0)
