"""Recursive rejection sampling: several drawn candidates, one target distribution, nothing lost."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_children(scores: Tensor, counts: int, uniforms: Tensor) -> Tensor:
    """Draw candidates without replacement, in the order in which one after the other would come.

    Adding Gumbel noise and taking the largest is that draw (Kool et al., arXiv:1903.06059).

    Args:
        scores: float32 [..., V], log-probabilities of the proposal up to a constant.
        counts: C, candidates.
        uniforms: float32 [..., V] in (0, 1).

    Returns:
        int64 [..., C].

    Equal noise leaves the order of the scores:

    >>> draw_children(torch.tensor([0.2, 0.5, 0.3]).log(), 2, torch.full((3,), 0.5)).tolist()
    [1, 2]
    """
    gumbel = -torch.log(-torch.log(uniforms.clamp(min=1e-30, max=1 - 6e-8)))
    return (scores + gumbel).topk(counts, dim=-1).indices


def recursive_rejection(target: Tensor, proposal: Tensor, children: Tensor, uniforms: Tensor) -> Tensor:
    """One token of the target's distribution for each row, a drawn child wherever possible.

    Child x is accepted with probability min(1, p(x) / q(x)). Refused, it leaves the residual p <- max(0, p - q) and
    the next child's proposal q without x, both normalised; after the last child the token comes from the residual
    (multi-round speculative sampling: SpecInfer, arXiv:2305.09781, section 4.3; without replacement as in Sequoia,
    arXiv:2402.12374, section 3.2). A refused child has no mass left in the residual, so a token that equals a child
    is an accepted one.

    Args:
        target: [A, V], p, rows sum to 1.
        proposal: [A, V], q, what the children were drawn from; rows sum to 1.
        children: int64 [A, C], in order of drawing, padded with -1.
        uniforms: [A, C + 1] in [0, 1).

    Returns:
        int64 [A].

    >>> p, q = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[1.0, 0.0, 0.0]])
    >>> [recursive_rejection(p, q, torch.tensor([[0]]), torch.tensor([[u, 0.9]])).item() for u in (0.4, 0.6)]
    [0, 1]
    """
    p, q = target.double(), proposal.double()
    token = torch.full((len(p),), -1, dtype=torch.int64, device=p.device)
    for place in range(children.shape[1]):
        child = children[:, place]
        trying = (child >= 0) & (token < 0)
        at = child.clamp(min=0)[:, None]
        own_p, own_q = p.gather(1, at)[:, 0], q.gather(1, at)[:, 0]
        accepted = trying & (uniforms[:, place] * own_q < own_p)
        token = child.where(accepted, token)
        refused = (trying & ~accepted)[:, None]
        rest = (p - q).clamp(min=0)
        mass = rest.sum(1, keepdim=True)
        # No mass is left only through rounding, where p and q are equal: p itself is right then.
        p = (rest / mass).where(refused & (mass > 0), p)
        without = q.scatter(1, at, 0.0)
        q = (without / without.sum(1, keepdim=True).clamp(min=1e-300)).where(refused, q)
    from_rest = p.cumsum(1)
    threshold = uniforms[:, -1:].double() * from_rest[:, -1:]
    drawn = torch.searchsorted(from_rest, threshold, right=True)[:, 0].clamp(max=p.shape[1] - 1)
    return token.where(token >= 0, drawn)
