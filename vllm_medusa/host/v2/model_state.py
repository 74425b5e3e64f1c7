"""The host's model state with trees: what surrounds the forward pass of a step on Model Runner V2."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.attn_utils import compute_mm_prefix_ranges

from vllm_medusa.host.layers import attend_as_cpus_do
from vllm_medusa.host.v2.clock import StageClock
from vllm_medusa.host.v2.counting import DeviceCounts
from vllm_medusa.host.v2.device_cache import DeviceTreeCache
from vllm_medusa.host.v2.rows import RowBuffers
from vllm_medusa.host.v2.sampling import TreeSampler
from vllm_medusa.host.v2.slots import SlotTrees

if TYPE_CHECKING:
    from vllm_medusa.host.v2.cpu_cache import CpuTreeCache


@cache
def with_trees(host: Any) -> Any:
    """A subclass of the host's model state; `trees` is set on the instance before its first step."""

    class TreeModelState(host):
        """The host's hooks around a forward pass, in the order of a step."""

        trees: SlotTrees
        counts: DeviceCounts | None = None  # set when warm-up is over
        clock: StageClock[Any]
        tree_cache: CpuTreeCache | DeviceTreeCache | None = None
        batch: Any = None  # that runs now

        def add_request(self, req_index: int, new_req_data: Any) -> None:
            """A slot is used anew."""
            super().add_request(req_index, new_req_data)
            self.trees.clear(req_index)

        def initialize_kv_cache(self, kv_cache_config: Any, block_tables: Any) -> None:
            """Once layers have their caches."""
            super().initialize_kv_cache(kv_cache_config, block_tables)
            layers = self.vllm_config.compilation_config.static_forward_context
            if self.device.type == "cpu" and attend_as_cpus_do(layers):
                from vllm_medusa.host.v2.cpu_cache import CpuTreeCache

                self.tree_cache = CpuTreeCache(layers, kv_cache_config)
                return
            if self.trees.rows is None:
                nodes = self.trees.num_nodes
                self.trees.rows = RowBuffers(self.max_num_tokens, self.max_num_reqs, nodes, self.device)
            self.tree_cache = DeviceTreeCache(layers, kv_cache_config, self.trees.rows, self.image_ranges)

        def image_ranges(self, req_ids: Sequence[str]) -> Any:
            """Tokens of pictures that see each other both ways, as of `DeviceTreeCache`."""
            if not self.supports_mm_inputs or not self.model_config.is_mm_prefix_lm:
                return None
            features, window = self.encoder_cache.mm_features, self.model_config.get_sliding_window()
            return compute_mm_prefix_ranges(req_ids=req_ids, mm_features=features, sliding_window=window)

        def get_additional_cg_support(self) -> tuple[AttentionCGSupport, str | None]:
            """Graphs hold steps of trees with as many rows each; others are cut at attention."""
            ours = AttentionCGSupport.UNIFORM_BATCH, "Medusa's tree attention"
            return min(super().get_additional_cg_support(), ours, key=lambda support: support[0].value)

        def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
            """The host's sampler for steps without trees, the walk for the others."""
            return sampler, TreeSampler(sampler, self.trees, self.clock)

        def preprocess_state(self, input_batch: Any, *args: Any, **kwargs: Any) -> None:
            """Slots are known, attention metadata is not built yet: lay the trees over the batch."""
            super().preprocess_state(input_batch, *args, **kwargs)
            self.clock.begin()
            self.trees.lay(input_batch)
            self.batch = input_batch

        def prepare_inputs(self, input_batch: Any, req_states: Any) -> Any:
            """Positions of several dimensions (M-RoPE), which are equal behind a prompt: a node's are its depth too."""
            inputs = super().prepare_inputs(input_batch, req_states)
            step, rope = self.trees.step, getattr(self, "rope_state", None)
            if rope is not None and step is not None and step.batch is input_batch:
                rope.positions[:, step.rows] += step.shift
            return inputs

        def prepare_attn(
            self,
            input_batch: Any,
            cudagraph_mode: Any,
            block_tables: Any,
            slot_mappings: Any,
            attn_groups: Any,
            kv_cache_config: Any,
            for_capture: bool = False,
            **kwargs: Any,
        ) -> dict[str, Any]:
            """Hang the trees on the host's metadata. Dry runs, which nothing lays trees over, stay causal."""
            where = (block_tables, slot_mappings, attn_groups)
            by_layer: dict[str, Any] = super().prepare_attn(
                input_batch, cudagraph_mode, *where, kv_cache_config, for_capture, **kwargs
            )
            if self.tree_cache is not None:
                self.tree_cache.attach(
                    by_layer,
                    input_batch,
                    attn_groups,
                    block_tables,
                    slot_mappings,
                    step=self.trees.step,
                    for_capture=for_capture,
                )
            return by_layer

        def postprocess_state(self, *args: Any, **kwargs: Any) -> None:
            """The commit, on the stream that ran the step and will run the next."""
            super().postprocess_state(*args, **kwargs)
            step = self.trees.step
            self.clock.mark("forward" if step is None else "walk")  # the host's own sampler is no stage of its own
            if step is not None and step.walk is not None:
                assert self.tree_cache is not None
                self.tree_cache.commit(step)
            if self.counts is not None:
                self.counts.count(self.batch, step)
            self.clock.mark("commit")

    return TreeModelState
