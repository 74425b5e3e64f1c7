"""Heads that do not change any more, for the few rows of few requests: one compiled call."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm_medusa.heads import native
from vllm_medusa.heads.products import rows_are_dear

if TYPE_CHECKING:
    from vllm_medusa.heads.model import MedusaHeads


class _Matrix(ctypes.Structure):
    _fields_ = [
        ("bytes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("size", ctypes.c_int64),
    ]


class _Heads(ctypes.Structure):
    """`Heads` of cpu_heads.cpp."""

    _fields_ = [
        ("first", _Matrix),
        ("root", _Matrix),
        ("back", _Matrix),
        ("unembedding", _Matrix),
        ("bias", ctypes.c_void_p),
        ("back_bias", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("embedding", ctypes.c_void_p),
        ("heads", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
    ]


class FrozenHeads:
    """A copy of bound heads with matrices in bytes, each row with a scale of its own.

    For one or two requests heads take as long as their weights take to be read, and as a handful of small operations
    take to be called. Bytes halve the one, a single call the other (1.6 to 0.9 ms on two cores for the bundled heads).
    Rounding moves a weight by up to 1/254 of the largest in its row: of no weight for drafts, which the target checks.
    """

    MOST_ROWS = 16  # requests times heads; beyond, products by AMX are quicker where there is AMX
    MOST_HEADS = 16

    def __init__(self, heads: MedusaHeads, scale: Tensor, embedding: Tensor | None) -> None:
        """Copy `heads`; `scale`: float32 [K], of each head's logits. Only where `suits` says so."""
        self._kept: list[Tensor] = []
        self._library: Any = native.library()
        none = _Matrix(None, None, 0, 0)
        trunk, hidden = heads.trunk, heads.config.hidden_size
        block = heads.layers[0] if trunk is None else trunk
        first, bias = block.weight.data, block.bias
        self._heads = _Heads(
            first=self._matrix(first.reshape(-1, hidden)),  # type: ignore[operator]
            root=none if heads.root is None else self._matrix(heads.root.data.reshape(-1, hidden)),
            back=none if trunk is None else self._matrix(trunk.out.data.flatten(0, 1)),
            unembedding=self._matrix(heads.unembedding_weight()[0]),
            bias=self._floats(bias),  # type: ignore[arg-type]
            back_bias=None if trunk is None else self._floats(trunk.out_bias.data),
            scales=self._floats(scale),
            embedding=None if heads.root is None or embedding is None else self._keep(embedding).data_ptr(),
            heads=heads.config.num_heads,
            hidden=hidden,
        )

    @staticmethod
    def suits(heads: MedusaHeads) -> bool:
        """Whether the call serves these heads: bfloat16 on a CPU with a compiler, one layer, one unembedding."""
        config, unembedding = heads.config, heads.unembedding_weight()
        one_layer = config.num_layers == (1 if heads.trunk is None else 0)
        sizes = (config.hidden_size, config.trunk_size or 16)
        small = config.num_heads <= FrozenHeads.MOST_HEADS and all(size % 16 == 0 for size in sizes)
        right = unembedding.device.type == "cpu" and unembedding.dtype == torch.bfloat16 and len(unembedding) == 1
        return one_layer and small and right and native.library() is not None

    def takes(self, hidden: Tensor) -> bool:
        """Whether these rows [B, H] are few enough, and of the type that was copied."""
        few = rows_are_dear(hidden) or len(hidden) * self._heads.heads <= self.MOST_ROWS
        return len(hidden) > 0 and few and hidden.dtype == torch.bfloat16

    def guess(self, hidden: Tensor, roots: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
        """The k likeliest places of every head's outputs.

        Args:
            hidden: bfloat16 [B, H].
            roots: int64 [B], the root tokens.
            k: at most the heads' outputs.

        Returns:
            Places int64 [B, K, k], best first, and their probabilities float32 [B, K, k].
        """
        shape = (len(hidden), self._heads.heads, k)
        places, probabilities = torch.empty(shape, dtype=torch.int64), torch.empty(shape)
        hidden, roots = hidden.contiguous(), roots.contiguous() if roots is not None else torch.zeros(0)
        self._library.medusa_guess(
            ctypes.byref(self._heads),
            hidden.data_ptr(),
            roots.data_ptr(),
            places.data_ptr(),
            probabilities.data_ptr(),
            len(hidden),
            k,
        )
        return places, probabilities

    def _matrix(self, weight: Tensor) -> _Matrix:
        wide = weight.float()
        scales = wide.abs().amax(dim=1).clamp_(min=torch.finfo(torch.float32).tiny) / 127
        in_bytes = (wide / scales[:, None]).round_().to(torch.int8)
        return _Matrix(self._keep(in_bytes).data_ptr(), self._floats(scales), *weight.shape)

    def _floats(self, values: Tensor | None) -> int | None:
        return None if values is None else self._keep(values.detach().float().flatten()).data_ptr()

    def _keep(self, values: Tensor) -> Tensor:
        """The same, dense, alive as long as this object."""
        self._kept.append(values.contiguous())
        return self._kept[-1]
