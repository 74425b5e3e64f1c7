"""Cross-entropy through a large frozen unembedding, without ever holding all logits."""

from typing import Any

import torch
from torch import Tensor

# Rows whose logits exist at one time: few enough for the processor's cache, enough for an efficient product.
CHUNK = 128


def linear_cross_entropy(states: Tensor, unembedding: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Per-row loss -log softmax(states @ unembedding^T)[target]; its gradient reaches `states`, scaled by `weights`.

    Both products and the softmax go chunk by chunk, and the gradient is taken on the way forward, so memory and
    memory traffic stay at one chunk of logits (the fused linear cross-entropy of Liger Kernel, arXiv:2410.10989).

    Args:
        states: [N, H] in any float type; the products run in the unembedding's type.
        unembedding: [Vd, H], frozen.
        targets: int64 [N], 0 to Vd - 1.
        weights: float32 [N], what each row's loss counts.

    Returns:
        float32 scalar, sum over rows of weight times loss.
    """
    total: Tensor = _LinearCrossEntropy.apply(states, unembedding, targets, weights)
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, unembedding: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        slopes = torch.empty_like(states)
        total = torch.zeros((), dtype=torch.float32, device=states.device)
        for first in range(0, states.shape[0], CHUNK):
            part = slice(first, first + CHUNK)
            target, weight = targets[part, None], weights[part, None]
            logits = (states[part].to(unembedding.dtype) @ unembedding.T).float()
            right = logits.gather(1, target)
            top = logits.amax(1, keepdim=True)
            shares = logits.sub_(top).exp_()
            norm = shares.sum(1, keepdim=True)
            total += ((norm.log() + top - right) * weight).sum()
            # d loss / d logits = softmax - one-hot
            shares.mul_(weight / norm).scatter_add_(1, target, -weight)
            slopes[part] = shares.to(unembedding.dtype) @ unembedding
        ctx.save_for_backward(slopes)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return slopes * grad_outputs[0].to(slopes.dtype), None, None, None
