"""Cross-entropy through a large unembedding, frozen or learnt, without ever holding all logits."""

from typing import Any

import torch
from torch import Tensor

# Rows whose logits exist at one time: few enough for the processor's cache, enough for an efficient product.
CHUNK = 128


def linear_cross_entropy(
    states: Tensor,
    unembedding: Tensor,
    targets: Tensor,
    shares: Tensor,
    weights: Tensor,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Per-row loss -Σ_s shares[s] log softmax(states @ unembedding^T)[targets[s]].

    Its gradient reaches `states`, and `unembedding` where that asks for one.

    With one target of share 1 that is cross-entropy; with a distribution's tokens and probabilities it is the KL
    divergence from it, but for a constant. Both products and the softmax go chunk by chunk, and the gradient is taken
    on the way forward, so memory and memory traffic stay at one chunk of logits (the fused linear cross-entropy of
    Liger Kernel, arXiv:2410.10989).

    Args:
        states: [N, H] in any float type.
        unembedding: [Vd, H].
        targets: int64 [N, S], each 0 to Vd - 1.
        shares: float32 [N, S], how much of the row each target is.
        weights: float32 [N], what each row's loss counts.
        dtype: in which the products run; None: the unembedding's.

    Returns:
        float32 scalar, sum over rows of weight times loss.
    """
    total: Tensor = _LinearCrossEntropy.apply(states, unembedding, targets, shares, weights, dtype or unembedding.dtype)
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        unembedding: Tensor,
        targets: Tensor,
        shares: Tensor,
        weights: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        slopes = torch.empty_like(states)
        learnt = torch.zeros_like(unembedding) if ctx.needs_input_grad[1] else None
        matrix = unembedding.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=states.device)
        for first in range(0, states.shape[0], CHUNK):
            part = slice(first, first + CHUNK)
            target, share, weight = targets[part], shares[part], weights[part, None]
            rows = states[part].to(dtype)
            logits = (rows @ matrix.T).float()
            right = (logits.gather(1, target) * share).sum(1, keepdim=True)
            whole = share.sum(1, keepdim=True)
            top = logits.amax(1, keepdim=True)
            guessed = logits.sub_(top).exp_()
            norm = guessed.sum(1, keepdim=True)
            total += ((whole * (norm.log() + top) - right) * weight).sum()
            # d loss / d logits = whole * softmax - shares
            guessed.mul_(weight * whole / norm).scatter_add_(1, target, -share * weight)
            slope = guessed.to(dtype)
            slopes[part] = slope @ matrix
            if learnt is not None:
                learnt += slope.T @ rows
        ctx.save_for_backward(slopes, learnt)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        slopes, learnt = ctx.saved_tensors
        (grad,) = grad_outputs
        back = None if learnt is None else learnt * grad.to(learnt.dtype)
        return slopes * grad.to(slopes.dtype), back, None, None, None, None
