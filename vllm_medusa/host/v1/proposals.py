"""`draft_sample_method: "probabilistic"`: drawn candidates are judged by recursive rejection, in the host's Sampler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_medusa.host.trees import StepTrees
from vllm_medusa.proposer import DrawnTokens
from vllm_medusa.tree.rejection import recursive_rejection


@dataclass(frozen=True)
class DrawnChildren:
    """Candidates of the rows that are asked now, where they were drawn.

    Attributes:
        places: int64 [D], which of the A asked rows have drawn candidates.
        children: int64 [D, C], their candidates in order of drawing, padded with -1.
        proposals: float32 [D, V], what these were drawn from.
    """

    places: Tensor
    children: Tensor
    proposals: Tensor

    @classmethod
    def find(
        cls, trees: StepTrees, asked: npt.NDArray[np.int64], standing: npt.NDArray[np.int64], vocab: int
    ) -> DrawnChildren | None:
        """Look up the candidates of every asked request below the row on which it stands.

        Args:
            trees: the step's trees.
            asked: int64 [A], requests by row of the batch.
            standing: int64 [R], each request's row; -1 where its walk has ended.
            vocab: V.
        """
        by_draft: dict[int, tuple[DrawnTokens, list[tuple[int, int, int]]]] = {}
        rows = standing.tolist()
        for place, request in enumerate(asked.tolist()):
            entry = trees.drafts[request]
            drawn = None if entry is None else entry.draft.drawn
            if entry is not None and drawn is not None and rows[request] >= 0 and drawn.which[entry.row]:
                by_draft.setdefault(id(drawn), (drawn, []))[1].append((place, request, entry.row))
        parts = [_below(trees, drawn, np.array(found), standing, vocab) for drawn, found in by_draft.values()]
        if not any(len(places) for places, _, _ in parts):
            return None
        places, children, proposals = (torch.cat(part) for part in zip(*parts, strict=True))
        return cls(places, children, proposals)


def _below(
    trees: StepTrees, drawn: DrawnTokens, found: npt.NDArray[np.int64], standing: npt.NDArray[np.int64], vocab: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Fields of `DrawnChildren` for rows [D, 3] of (place, request, row of the draft) that share one draft.

    C is the width of the step's widest tree for all of them, so that parts fit together.
    """
    requests, width = found[:, 1], trees.parents.shape[1]
    at = standing[requests]
    hit = (trees.parents[requests] == at[:, None]) & (np.arange(width) < trees.sizes[requests][:, None])
    order = np.argsort(~hit, axis=1, kind="stable")  # children first, in order of drawing
    tokens = np.where(np.take_along_axis(hit, order, 1), np.take_along_axis(trees.tokens[requests], order, 1), -1)
    has = hit.any(axis=1)
    heads = torch.from_numpy(trees.depths[requests, at][has])
    own = drawn.probabilities[torch.from_numpy(found[has, 2]), heads]
    places = torch.arange(own.shape[1]) if drawn.token_map is None else drawn.token_map
    proposals = own.new_zeros(len(own), vocab).index_copy(1, places, own)
    return torch.from_numpy(found[has, 0]), torch.from_numpy(tokens[has]), proposals


class ProposalSampler(nn.Module):
    """Stands where the host's Sampler has its last stage: top-k, top-p and the draw."""

    def __init__(self, host: nn.Module) -> None:
        """Leave every row without drawn candidates to the host's own stage."""
        super().__init__()
        self.host = host
        self.drawn: DrawnChildren | None = None

    def forward(
        self,
        logits: Tensor,
        generators: dict[int, torch.Generator],
        k: Tensor | None,
        p: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Draw one token per row.

        Args:
            logits: float32 [A, V], processed and divided by the temperature.
            generators: of seeded rows.
            k, p: [A], top-k and top-p.

        Returns:
            Tokens [A], and log-probabilities where the host is to show processed ones.
        """
        drawn, self.drawn = self.drawn, None
        if drawn is None:
            plain: tuple[Tensor, Tensor | None] = self.host(logits, generators, k, p)
            return plain
        at, widest = drawn.places, int((drawn.children >= 0).sum(1).max())
        children = drawn.children[:, :widest]
        kept = apply_top_k_top_p(logits[at], None if k is None else k[at], None if p is None else p[at])
        target = kept.softmax(dim=-1, dtype=torch.float32)
        uniforms = torch.rand(len(at), widest + 1)
        for row, place in enumerate(at.tolist()):
            if place in generators:  # as many as the request itself needs, whatever the batch
                count = int((children[row] >= 0).sum())
                uniforms[row, [*range(count), -1]] = torch.rand(count + 1, generator=generators[place])
        chosen = recursive_rejection(target, drawn.proposals, children, uniforms)
        judged = set(at.tolist())
        others = {place: generator for place, generator in generators.items() if place not in judged}
        tokens, shown = self.host(logits, others, k, p)
        return tokens.index_copy(0, at, chosen.to(tokens.dtype)), shown
