"""Candidates of sampled requests, drawn by the very noise by which the target will draw.

The target says the token with the largest z / T + g: its logits z over the temperature T, and Gumbel noise g. Where
that noise is known beforehand, heads with logits near z find the token by the same rule, and find it more often than
their likeliest token is said. How surely depends on how far apart logits and z are. Take that to be as much as the
calibrated temperature c says; then

    probability = softmax((logits + T g) / sqrt(T^2 + c^2))

At T = 0 these are the likeliest tokens with their calibrated probabilities. Replayed over 1,200 sampled tokens of
SmolLM2-135M-Instruct (MT-Bench, bundled heads, 16 nodes), likeliest against coupled candidates: 1.54 and 1.73 tokens a
step at T = 1, 1.80 and 1.90 at 0.7, 2.06 and 2.07 at 0.3.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_medusa.heads.model import Candidates, MedusaHeads

# Logits float32 [B, K, Vd] and the tokens int64 [Vd] of their places (None: the places) to logits / T + g; where T = 0
# to the logits. It may write over what it is handed.
Perturb = Callable[[Tensor, Tensor | None], Tensor]


def coupled_candidates(
    heads: MedusaHeads, hidden: Tensor, roots: Tensor, k: int, temperatures: Tensor, perturb: Perturb
) -> Candidates:
    """The `k` tokens of each head that the target will most likely draw.

    Args:
        heads: bound.
        hidden, roots: as in `MedusaHeads.states`.
        k: R.
        temperatures: float32 [B], of the requests.
        perturb: adds the target's noise; head 1's is that of the row on which the root stands.
    """
    drawn = perturb(heads(hidden, roots).to(torch.float32), heads.token_map)
    asked = temperatures[:, None, None]
    drawn.mul_(asked.where(asked > 0, 1.0) / (asked.square() + heads.temperatures.square()).sqrt())
    values, places = drawn.topk(k, dim=-1)
    probabilities = (values - drawn.logsumexp(-1, keepdim=True)).exp()
    return Candidates(places if heads.token_map is None else heads.token_map[places], probabilities)
