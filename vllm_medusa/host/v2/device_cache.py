"""The KV cache of a GPU engine whose layers check trees: what a step's rows may see, and the commit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata

from vllm_medusa.host.device_attention import LeadingTrees
from vllm_medusa.host.device_layers import DeviceLayers
from vllm_medusa.host.v2.rows import RowBuffers
from vllm_medusa.host.v2.slots import StepTrees

ImageRanges = Callable[[Sequence[str]], Mapping[int, Sequence[tuple[int, int]]] | None]


class DeviceTreeCache(DeviceLayers):
    """Nothing here waits for the device.

    Attributes:
        rows: what each row of a step may see.
        image_ranges: first and last tokens that see each other both ways, by the request's place; None: no such model.
    """

    def __init__(
        self, layers: Mapping[str, Any], kv_cache_config: Any, rows: RowBuffers, image_ranges: ImageRanges
    ) -> None:
        """Adopt the layers.

        Args:
            layers, kv_cache_config: as of `DeviceLayers`.
            rows: to be filled before `attach`.
            image_ranges: of the requests with these ids.
        """
        super().__init__(layers, kv_cache_config)
        self._config = kv_cache_config
        self._slots: Tensor | None = None
        self.rows = rows
        self.image_ranges = image_ranges

    def attach(
        self,
        by_layer: Mapping[str, Any],
        batch: Any,
        attn_groups: Sequence[Sequence[Any]],
        block_tables: Sequence[Tensor],
        slot_mappings: Tensor,
        *,
        step: StepTrees | None,
        for_capture: bool,
    ) -> None:
        """Hang a step's trees on the host's attention metadata.

        Args:
            by_layer: the host's metadata by layer name; layers of one attention group share one.
            batch: the host's, of R requests, those with drafts first.
            attn_groups: the host's attention groups by KV cache group.
            block_tables: int32 [R, n] by KV cache group.
            slot_mappings: int64 [groups, tokens].
            step: unused: `rows` knows its trees.
            for_capture: a CUDA graph is recorded, for batches of as many rows for each request as this one has.
        """
        self._slots = slot_mappings
        scheduled = batch.num_scheduled_tokens
        trees = batch.num_reqs if for_capture and _is_uniform(scheduled) else leading_trees(batch)
        if trees == 0:
            return
        num_rows = int(batch.query_start_loc_np[trees])
        others: Mapping[str, Any] = {}
        tables = {}
        for groups in attn_groups:
            for group in groups:
                table = by_layer[group.layer_names[0]].block_table
                # Where the host maps its blocks to smaller ones, it does so in one place for all metadata.
                alone = trees == batch.num_reqs or group.kernel_block_size is None
                tables[group.layer_names[0]] = table if alone else table[:trees].clone()
        if trees < batch.num_reqs:
            others = self._host_part(batch, attn_groups, block_tables, slot_mappings, trees, num_rows)
        else:
            trees = len(batch.seq_lens)  # with those that fill up a graph
        starts = batch.query_start_loc[: trees + 1]
        inputs = {
            "context_lens": self.rows.set_context(batch.seq_lens[:trees], starts),
            "query_start_loc": starts,
            "ancestors": self.rows.ancestors[:num_rows],
            "depths": self.rows.depths[:num_rows],
            "max_rows": int(scheduled[: min(trees, len(scheduled))].max()),
            "max_context": self._longest(by_layer, batch, trees),
        }
        for groups in attn_groups:
            for group in groups:
                first = group.layer_names[0]
                own = inputs | {"block_table": tables[first][:trees]}
                by_layer[first].trees = LeadingTrees(num_rows, own, others.get(first))

    @staticmethod
    def _longest(by_layer: Mapping[str, Any], batch: Any, trees: int) -> int:
        """No request of a tree is longer; while a graph is recorded, no request that it will ever serve."""
        if trees < batch.num_reqs:
            return int(batch.seq_lens_cpu_upper_bound[:trees].max())
        return int(next(iter(by_layer.values())).max_seq_len)

    def _host_part(
        self,
        batch: Any,
        attn_groups: Any,
        block_tables: Sequence[Tensor],
        slot_mappings: Tensor,
        trees: int,
        num_rows: int,
    ) -> Mapping[str, Any]:
        """The host's metadata for the requests behind the first `trees` alone."""
        upper = batch.seq_lens_cpu_upper_bound[trees : batch.num_reqs]
        built: Mapping[str, Any] = build_attn_metadata(
            attn_groups=attn_groups,
            num_reqs=batch.num_reqs - trees,
            num_tokens=batch.num_tokens - num_rows,
            query_start_loc_gpu=batch.query_start_loc[trees : batch.num_reqs + 1] - num_rows,
            query_start_loc_cpu=torch.from_numpy(batch.query_start_loc_np[trees : batch.num_reqs + 1] - num_rows),
            max_query_len=int(batch.num_scheduled_tokens[trees:].max()),
            seq_lens=batch.seq_lens[trees:],
            max_seq_len=int(upper.max()),
            block_tables=[table[trees:] for table in block_tables],
            slot_mappings=slot_mappings[:, num_rows:],
            kv_cache_config=self._config,
            seq_lens_cpu_upper_bound=upper,
            positions=batch.positions[num_rows:],
            is_prefilling=torch.from_numpy(batch.is_prefilling_np[trees:]),
            req_idx=batch.idx_mapping_np[trees:],
            mm_req_doc_ranges=self.image_ranges(batch.req_ids[trees : batch.num_reqs]),
        )
        return built

    def commit(self, step: StepTrees) -> None:
        """Move accepted rows to the slots that plain decoding would have filled, in all layers of a group at once.

        In the step that checked them: the next one, or the prefix cache, may read these slots.
        """
        assert self._slots is not None
        sources, targets = step.moves()
        for slots, movers in zip(self._slots, self.movers, strict=True):
            places, taken = slots[sources.clamp(min=0)].where(sources >= 0, -1), slots[targets]
            for mover in movers:
                mover.move(places, taken)


def leading_trees(batch: Any) -> int:
    """How many requests of the host's batch have drafts; they come first, with a row for each draft and the root."""
    if batch.num_draft_tokens == 0:
        return 0
    drafts = batch.num_draft_tokens_per_req
    count = int(np.count_nonzero(drafts))
    rows = batch.num_scheduled_tokens[:count]
    assert (drafts[:count] + 1 == rows).all(), "vLLM orders its batch in another way than we know"
    return count


def _is_uniform(scheduled: Any) -> bool:
    return bool(scheduled[0] > 1 and (scheduled == scheduled[0]).all())
