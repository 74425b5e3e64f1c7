"""The rows of a step that check trees where they lie between others, and the host's metadata for those others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_medusa.host.trees import StepTrees


@dataclass(frozen=True)
class CheckedRows:
    """The rows of one step that check trees: A of its R requests, T rows in all.

    Attributes:
        requests: bool [R], which requests these are.
        rows: int64 [T], their rows among the step's tokens, request by request.
        context: int64 [A], tokens in the cache before each root.
        counts: int64 [A], rows of each request.
        ancestors: int64 [T, W], each row's ancestor bits (uint64 words seen as int64).
        depths: int64 [T], of each row.
    """

    requests: Tensor
    rows: Tensor
    context: Tensor
    counts: Tensor
    ancestors: Tensor
    depths: Tensor

    @classmethod
    def of(cls, step: StepTrees) -> CheckedRows:
        """The rows of all requests whose nodes are no chain."""
        which = step.is_tree
        on_row = step.on_row[which]
        return cls(
            requests=torch.from_numpy(which),
            rows=torch.from_numpy(step.token_rows(which)),
            context=torch.from_numpy(step.context[which]),
            counts=torch.from_numpy(step.sizes[which] + 1),
            ancestors=torch.from_numpy(step.ancestors[which][on_row].view("int64")),
            depths=torch.from_numpy(step.depths[which][on_row]),
        )


def part_of_step(metadata: Any, which: Tensor, builder: Any) -> tuple[Tensor, Any] | None:
    """The host's metadata for the requests `which` (bool [R], on the host) alone, and the indices of their tokens.

    Args:
        metadata: the host's, of the whole step.
        which: the requests.
        builder: the host's, of such metadata.
    """
    chosen = which.nonzero()[:, 0]
    if len(chosen) == 0:
        return None
    device = metadata.query_start_loc.device
    starts = metadata.query_start_loc.to("cpu", torch.int64)
    lengths = (starts[1:] - starts[:-1])[chosen]
    rows = torch.cat([torch.arange(int(starts[r]), int(starts[r + 1])) for r in chosen]).to(device)
    query_start_loc = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(metadata.query_start_loc.dtype)
    chosen = chosen.to(device)
    part = CommonAttentionMetadata(
        query_start_loc=query_start_loc.to(device),
        query_start_loc_cpu=query_start_loc,
        seq_lens=metadata.seq_lens[chosen],
        num_reqs=len(chosen),
        num_actual_tokens=len(rows),
        max_query_len=int(lengths.max()),
        max_seq_len=metadata.max_seq_len,
        block_table_tensor=metadata.block_table[chosen],
        slot_mapping=metadata.slot_mapping[rows],
    )
    return rows, builder.build(0, part)
