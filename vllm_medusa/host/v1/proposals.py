"""`draft_sample_method: "probabilistic"`: drawn candidates are judged by recursive rejection, in the host's Sampler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_medusa.host.trees import StepTrees
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
    def find(cls, trees: StepTrees, asked: Tensor, standing: Tensor, vocab: int) -> DrawnChildren | None:
        """Look up the candidates of every asked request below the row on which it stands.

        Args:
            trees: the step's trees.
            asked: int64 [A], requests by row of the batch.
            standing: int64 [R], each request's row; -1 where its walk has ended.
            vocab: V.
        """
        places, children, proposals = [], [], []
        for place, request in enumerate(asked.tolist()):
            entry, row = trees.drafts[request], int(standing[request])
            drawn = None if entry is None else entry.draft.drawn
            if entry is None or drawn is None or not drawn.which[entry.row] or row < 0:
                continue
            below = np.flatnonzero(trees.parents[request, : trees.sizes[request]] == row)
            if not len(below):
                continue
            places.append(place)
            children.append(torch.from_numpy(trees.tokens[request, below]))
            proposals.append(drawn.proposal(entry.row, int(trees.depths[request, row]), vocab))
        if not places:
            return None
        padded = nn.utils.rnn.pad_sequence(children, batch_first=True, padding_value=-1)
        return cls(torch.tensor(places), padded, torch.stack(proposals))


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
        at = drawn.places
        kept = apply_top_k_top_p(logits[at], None if k is None else k[at], None if p is None else p[at])
        target = kept.softmax(dim=-1, dtype=torch.float32)
        uniforms = torch.rand(len(at), drawn.children.shape[1] + 1)
        for row, place in enumerate(at.tolist()):
            if place in generators:  # as many as the request itself needs, whatever the batch
                count = int((drawn.children[row] >= 0).sum())
                uniforms[row, [*range(count), -1]] = torch.rand(count + 1, generator=generators[place])
        chosen = recursive_rejection(target, drawn.proposals, drawn.children, uniforms)
        judged = set(at.tolist())
        others = {place: generator for place, generator in generators.items() if place not in judged}
        tokens, shown = self.host(logits, others, k, p)
        return tokens.index_copy(0, at, chosen.to(tokens.dtype)), shown
