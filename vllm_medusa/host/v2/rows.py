"""What each row of a step may see, at fixed addresses: a CUDA graph replays with what stands there."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_medusa.tree.tensors import climb


class RowBuffers:
    """Ancestors and depths by token of the step, cached tokens by request. What is no tree is a chain: causal.

    Attributes:
        ancestors: int64 [tokens, W].
        depths: int64 [tokens].
        context: int64 [requests], tokens in the cache before each root.
    """

    def __init__(self, num_tokens: int, num_requests: int, num_nodes: int, device: torch.device) -> None:
        """Room for steps of so many tokens and requests, with trees of up to `num_nodes` nodes."""
        chain = torch.arange(num_nodes, device=device)[None]
        depths, ancestors = climb(chain, num_nodes)
        self._chain = ancestors[0]
        self.ancestors = self._chain.repeat(-(-num_tokens // (num_nodes + 1)), 1)[:num_tokens].contiguous()
        self.depths = depths[0].repeat(-(-num_tokens // (num_nodes + 1)))[:num_tokens].contiguous()
        self.context = torch.zeros(num_requests, dtype=torch.int64, device=device)

    def put(self, places: Tensor, local: Tensor, has_tree: Tensor, depths: Tensor, ancestors: Tensor) -> None:
        """Write the rows that are to be checked.

        Args:
            places: int64 [L], their places among the step's tokens.
            local: int64 [L], of each row within its request, 0 for the root.
            has_tree: bool [L], whether it belongs to a tree; else to a chain.
            depths: int64 [L], ancestors: int64 [L, W], of tree rows.
        """
        self.depths[places] = depths.where(has_tree, local)
        self.ancestors[places] = ancestors.where(has_tree[:, None], self._chain[local])

    def set_context(self, seq_lens: Tensor, query_start_loc: Tensor) -> Tensor:
        """Cached tokens of R requests from their lengths after this step int [R] and their bounds int [R + 1].

        Requests that only fill up a graph have no rows and no tokens.
        """
        context = self.context[: len(seq_lens)]
        torch.sub(seq_lens, query_start_loc[1:] - query_start_loc[:-1], out=context)
        return context.clamp_(min=0)
