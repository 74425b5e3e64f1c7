"""The naive truth about attention over a tree: unroll every path and run ordinary causal attention along it."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_medusa.tree.topology import Tree


def reference_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tree: Tree,
    scale: float,
    softcap: float = 0.0,
    sliding_window: int = -1,
    dtype: torch.dtype = torch.float64,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one request's tree rows, slowly and beyond doubt.

    Args:
        query: [rows, Hq, D], the root's row first.
        keys, values: [P + rows, Hkv, D], the prefix's tokens in order, then those of the tree's rows.
        tree: rows = tree.num_rows.
        scale: what dot products are multiplied by.
        softcap: scores become softcap * tanh(score / softcap); 0 leaves them.
        sliding_window: a row sees only keys fewer than this many positions back, itself counted as 0; -1: all.
        dtype: of the arithmetic and of the result.
        sinks: [Hq], a score for each head that no key has: it takes its share of the softmax and draws no value.

    Returns:
        [rows, Hq, D]. With the tree cat(sat, ran), dog, the path "the cat ran" is attended as if it were a text:
        the row of "ran" sees the prefix, "the", "cat" and itself.
    """
    context = len(keys) - tree.num_rows
    out = torch.empty(query.shape, dtype=dtype)
    for row in range(tree.num_rows):
        if tree.children(row):
            continue  # on the way to a leaf
        path = [0, *tree.path(row)]
        text = torch.tensor([*range(context), *(context + node for node in path)])
        seen = query[path], keys[text], values[text]
        out[path] = causal_attention(*seen, scale, softcap, sliding_window, dtype, sinks)
    return out


def causal_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    softcap: float = 0.0,
    sliding_window: int = -1,
    dtype: torch.dtype = torch.float64,
    sinks: Tensor | None = None,
) -> Tensor:
    """Ordinary attention of the last n tokens of a text.

    Args:
        query: [n, Hq, D]; keys, values: [L, Hkv, D], L >= n. The rest as in `reference_attention`.

    Returns:
        [n, Hq, D].
    """
    group = query.shape[1] // keys.shape[1]
    q = query.to(dtype)
    k = keys.to(dtype).repeat_interleave(group, dim=1)
    v = values.to(dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    back = torch.arange(len(keys) - len(query), len(keys))[:, None] - torch.arange(len(keys))
    visible = back >= 0
    if sliding_window > 0:
        visible &= back < sliding_window
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(dtype)[:, None, None].expand(-1, len(query), 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(keys)], v)
