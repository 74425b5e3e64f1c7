"""From hidden rows to drafts: what the heads guess, grown into one tree per request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vllm_medusa.config import SETTINGS_KEY, Settings
from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.checkpoint import load_heads
from vllm_medusa.heads.model import Candidates, MedusaHeads
from vllm_medusa.tree.growth import grow_dynamic
from vllm_medusa.tree.topology import Tree

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TreeDraft:
    """Drafts for B requests, at most N nodes each, in the order in which nodes are likely to be reached.

    Attributes:
        tokens: int64 [B, N], token of each node.
        parents: int64 [B, N], row of each node's parent (0 = root); -1 beyond `sizes`.
        ranks: int64 [B, N], which of its head's candidates a node is.
        reach: float32 [B, N], probability that the walk gets to the node.
        sizes: int64 [B], nodes of each request.
    """

    tokens: Ints
    parents: Ints
    ranks: Ints
    reach: Floats
    sizes: Ints


class MedusaProposer:
    """Heads and tree settings of one engine; the class that the host's `custom_class` method builds."""

    def __init__(self, vllm_config: Any) -> None:
        """Read our settings from the host's config (any object with `additional_config`)."""
        self.settings = Settings(**vllm_config.additional_config[SETTINGS_KEY])
        self.fixed_tree = self.settings.fixed_tree
        self.heads: MedusaHeads | None = None

    def load_model(self, target_model: nn.Module) -> None:
        """Load the heads and tie them to the target's unembedding and embedding.

        Raises:
            MedusaError: the target keeps no plain `lm_head` and token embedding to share.
        """
        unembedding, embedding = _weight(target_model, "lm_head"), _weight(target_model, "embed_tokens")
        embedding = unembedding if embedding is None else embedding
        unembedding = embedding if unembedding is None else unembedding
        if unembedding is None or embedding is None:
            raise MedusaError.of(
                "model",
                type(target_model).__name__,
                "the target has neither lm_head nor embed_tokens with plain weights",
            )
        heads = load_heads(self.settings.heads, draft_vocab=self.settings.draft_vocab)
        heads = heads.to(device=unembedding.device, dtype=unembedding.dtype)
        heads.bind(unembedding, embedding)
        self.heads = heads.eval()

    @torch.inference_mode()
    def propose(self, hidden: Tensor, roots: Tensor) -> TreeDraft:
        """Draft a tree for each request.

        Args:
            hidden: [B, H], the target's hidden row (after the final norm) that produced each root token.
            roots: int64 [B], the root tokens: the last ones emitted.
        """
        assert self.heads is not None, "load_model comes first"
        candidates = self.heads.candidates(hidden, roots, self.heads.config.top_k)
        nodes = self.settings.num_speculative_tokens
        return self._grow(candidates, nodes) if self.fixed_tree is None else self._fill(self.fixed_tree, candidates)

    def _grow(self, candidates: Candidates, nodes: int) -> TreeDraft:
        grown = grow_dynamic(candidates.probabilities, nodes)
        flat = (grown.depths - 1).clamp(min=0) * candidates.tokens.shape[2] + grown.ranks
        tokens = candidates.tokens.flatten(1).gather(1, flat)
        return TreeDraft(
            tokens=tokens.cpu().numpy(),
            parents=grown.parents.cpu().numpy(),
            ranks=grown.ranks.cpu().numpy(),
            reach=grown.reach.cpu().numpy(),
            sizes=(grown.parents >= 0).sum(1).cpu().numpy(),
        )

    def _fill(self, tree: Tree, candidates: Candidates) -> TreeDraft:
        batch = candidates.tokens.shape[0]
        parents, ranks = np.array(tree.parents, dtype=np.int64), np.array(tree.ranks, dtype=np.int64)
        head = np.array(tree.depths[1:], dtype=np.int64) - 1
        tokens = candidates.tokens.cpu().numpy()[:, head, ranks]
        own = candidates.probabilities.float().cpu().numpy()[:, head, ranks]
        reach = np.ones((batch, tree.num_rows), dtype=np.float32)
        for depth in range(1, tree.max_depth + 1):
            nodes = np.flatnonzero(head == depth - 1)
            reach[:, nodes + 1] = reach[:, parents[nodes]] * own[:, nodes]
        shape = (batch, tree.num_nodes)
        return TreeDraft(
            tokens=tokens,
            parents=np.broadcast_to(parents, shape).copy(),
            ranks=np.broadcast_to(ranks, shape).copy(),
            reach=reach[:, 1:],
            sizes=np.full(batch, tree.num_nodes, dtype=np.int64),
        )


def _weight(model: nn.Module, name: str) -> Tensor | None:
    """The weight [V, H] of the first module of the target whose last name is `name`, without the host's padding."""
    module = getattr(model, name, None)
    if module is None:
        module = next((found for path, found in model.named_modules() if path.rsplit(".", 1)[-1] == name), None)
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        return None
    # The host pads its rows to a multiple of 64; behind the model's own vocabulary there is nothing to guess.
    return weight.data[: getattr(module, "org_vocab_size", None)]
