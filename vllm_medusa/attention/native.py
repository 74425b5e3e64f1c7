"""The compiled kernel, called through ctypes."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from vllm_medusa.attention.inputs import PLAIN_LAYER, LayerInputs, TreeInputs
from vllm_medusa.attention.layout import KeyLayout
from vllm_medusa.compiled import load_library, loaded_once

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("cpu_kernel.cpp")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FLOAT8 = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}

_Address, _Number, _Float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Step(ctypes.Structure):
    """`MedusaStep` of kernel/step.h, field by field."""

    _fields_: ClassVar[Any] = [
        *((name, _Number) for name in ("requests", "words", "block_size", "table_width", "window")),
        *((name, _Address) for name in ("table", "contexts", "starts", "depths", "ancestors", "visible")),
        *((name, _Address) for name in ("key_token", "key_dim", "value_token", "value_dim")),
        *((name, _Number) for name in ("key_run", "value_run", "dtype", "cache", "heads", "kv_heads", "dim", "amx")),
        *((name, _Float) for name in ("scale", "softcap")),
    ]


class _Layer(ctypes.Structure):
    """`MedusaLayer` of kernel/step.h, field by field."""

    _fields_: ClassVar[Any] = [
        *(("query", _Address), ("query_row", _Number), ("query_head", _Number)),
        *(("keys", _Address), ("key_block", _Number), ("key_head", _Number)),
        *(("values", _Address), ("value_block", _Number), ("value_head", _Number)),
        *(("out", _Address), ("out_row", _Number), ("out_head", _Number)),
        *(("sinks", _Address), ("key_scale", _Float), ("value_scale", _Float)),
    ]


class _Move(ctypes.Structure):
    """`MedusaMove` of kernel/step.h, field by field."""

    _fields_: ClassVar[Any] = [
        *((name, _Number) for name in ("layers", "kv_heads", "block_size", "dim", "item")),
        *((name, _Number) for name in ("key_block", "key_head", "value_block", "value_head")),
        *((name, _Address) for name in ("keys", "values", "key_token", "key_dim", "value_token", "value_dim")),
        *(("moves", _Number), ("from", _Address), ("to", _Address)),
    ]


class _Places(NamedTuple):
    """A layout as the kernel reads it: place(token, dim) = token part + dim part.

    Attributes:
        layout: kept alive, since places are remembered by its identity.
        parts: int32, for keys and for values each the token parts [block] and the dim parts [D].
        key_run: a tile's tokens stand next to each other in the keys.
        value_run: a token's dims stand next to each other in the values.
        amx: packed as AMX multiplies it.
    """

    layout: KeyLayout
    parts: tuple[Tensor, Tensor, Tensor, Tensor]
    key_run: bool
    value_run: bool
    amx: bool


class Kernel:
    """The compiled kernel of this machine."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """`library`: what `load_kernel` built."""
        self._prepare = library.medusa_prepare
        self._attend = library.medusa_attend
        self._move = library.medusa_move
        self._prepare.restype = self._attend.restype = self._move.restype = None
        library.medusa_has_amx.restype = library.medusa_has_float16.restype = _Number
        self.has_amx = bool(library.medusa_has_amx())
        self._has_float16 = bool(library.medusa_has_float16())
        self._known: dict[int, _Places] = {}

    def supports(self, dtype: torch.dtype, layout: KeyLayout) -> bool:
        """Whether it reads caches of this dtype and packing: separable, blocks of 16 tokens or a multiple."""
        known = dtype in {**_DTYPES, **_FLOAT8} and (dtype != torch.float16 or self._has_float16)
        return known and layout.separable and layout.block_size % 16 == 0

    def plan(self, inputs: TreeInputs, amx: bool = True) -> KernelPlan:
        """Prepare a step; `amx=False` keeps to the portable way even where AMX could be used."""
        return KernelPlan(self, inputs, amx and self.has_amx)

    def mover(self, layout: KeyLayout, caches: Sequence[tuple[Tensor, Tensor]]) -> SlotMover:
        """For the caches (keys, values) of several layers, each [blocks, Hkv, block_size, D], all of one shape."""
        return SlotMover(self, layout, caches)

    def _places(self, layout: KeyLayout) -> _Places:
        known = self._known.get(id(layout))
        if known is None:
            known = self._known[id(layout)] = _read(layout)
        return known


class KernelPlan:
    """One step, ready to run for every layer; what the C side points to is kept alive here."""

    def __init__(self, kernel: Kernel, inputs: TreeInputs, amx: bool) -> None:
        """See `Kernel.plan`."""
        places = kernel._places(inputs.layout)
        self._amx = amx and places.amx
        self._attend = kernel._attend
        rows, words = inputs.ancestors.shape
        table = _dense(inputs.block_table, torch.int32)
        arrays = [
            table,
            _dense(inputs.context_lens, torch.int64),
            _dense(inputs.query_start_loc, torch.int64),
            _dense(inputs.depths, torch.int64),
            _dense(inputs.ancestors.view(torch.int64), torch.int64),
            torch.empty(rows, words + 1, dtype=torch.int64),
            *places.parts,
        ]
        self._alive = arrays, places
        step = _Step(
            *(table.shape[0], words, inputs.layout.block_size, table.shape[1], inputs.sliding_window),
            *(array.data_ptr() for array in arrays),
            *(places.key_run, places.value_run),
        )
        step.dim, step.scale, step.softcap = inputs.layout.head_dim, inputs.scale, inputs.softcap
        self._step, self._layer = step, _Layer()
        self._arguments = ctypes.byref(self._step), ctypes.byref(self._layer)
        kernel._prepare(self._arguments[0])

    def run(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        out: Tensor,
        own: LayerInputs = PLAIN_LAYER,
    ) -> None:
        """Fill `out`; arguments as of `TreeAttentionPlan.run`, the last dimension dense in each."""
        step, layer = self._step, self._layer
        dtype = query.dtype
        assert dtype == out.dtype and key_cache.dtype == value_cache.dtype
        assert dtype == key_cache.dtype or key_cache.dtype in _FLOAT8
        step.dtype, step.heads, step.kv_heads = _DTYPES[dtype], query.shape[1], key_cache.shape[1]
        step.cache = _FLOAT8.get(key_cache.dtype, 0)
        step.amx = self._amx and key_cache.dtype == torch.bfloat16
        sinks = None if own.sinks is None else _dense(own.sinks, torch.float32)
        layer.sinks = None if sinks is None else sinks.data_ptr()
        layer.key_scale, layer.value_scale = own.key_scale, own.value_scale
        layer.query, layer.keys = query.data_ptr(), key_cache.data_ptr()
        layer.values, layer.out = value_cache.data_ptr(), out.data_ptr()
        layer.query_row, layer.query_head, query_dense = query.stride()
        layer.out_row, layer.out_head, out_dense = out.stride()
        layer.key_block, layer.key_head, _, key_dense = key_cache.stride()
        layer.value_block, layer.value_head, _, value_dense = value_cache.stride()
        assert query_dense == out_dense == key_dense == value_dense == 1
        self._attend(*self._arguments)


class SlotMover:
    """Moves cached tokens from slot to slot, in all layers by one call."""

    def __init__(self, kernel: Kernel, layout: KeyLayout, caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """See `Kernel.mover`. The caches must outlive this object."""
        keys, values = caches[0]
        assert all(k.stride() == keys.stride() and k.dtype == keys.dtype for k, _ in caches)
        assert all(v.stride() == values.stride() and v.dtype == values.dtype for _, v in caches)
        places = kernel._places(layout)
        tables = [(_Address * len(caches))(*(pair[half].data_ptr() for pair in caches)) for half in (0, 1)]
        self._alive = tables, places, caches
        self._run = kernel._move
        self._move = _Move(
            *(len(caches), keys.shape[1], layout.block_size, layout.head_dim, keys.element_size()),
            *(keys.stride(0), keys.stride(1), values.stride(0), values.stride(1)),
            *(ctypes.cast(table, _Address) for table in tables),
            *(part.data_ptr() for part in places.parts),
        )

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Move tokens one after the other.

        Args:
            sources, targets: int64 [M], slots. A target may be an earlier move's source, never a later one's.
        """
        sources, targets = _dense(sources, torch.int64), _dense(targets, torch.int64)
        move = self._move
        move.moves = len(sources)
        setattr(move, "from", sources.data_ptr())
        move.to = targets.data_ptr()
        self._run(ctypes.byref(move))


@loaded_once(logger, logging.WARNING, "Tree attention runs without its compiled kernel, slower on long texts: %s")
def load_kernel() -> Kernel:
    """The compiled kernel of this machine, if it can be built (see compiled.py)."""
    return Kernel(load_library(_SOURCE))


def _read(layout: KeyLayout) -> _Places:
    parts = []
    for places in (layout.keys, layout.values):
        parts += [places[:, 0], places[0] - places[0, 0]]
    block_size = layout.block_size
    tile = 32 if block_size % 32 == 0 else 16
    key_tokens = layout.keys[:, 0].view(-1, tile)
    return _Places(
        layout,
        tuple(part.to(torch.int32).contiguous() for part in parts),  # type: ignore[arg-type]
        key_run=bool((key_tokens.diff(dim=1) == 1).all()),
        value_run=bool((layout.values[0].diff() == 1).all()),
        amx=_is_packed_for_amx(layout),
    )


def _is_packed_for_amx(layout: KeyLayout) -> bool:
    """Keys: groups of 16 tokens, in them rows of pairs of dims. Values: groups of 16 dims, rows of pairs of tokens.

    Each row of 16 pairs, 64 bytes of bfloat16, is a row of an AMX tile.
    """
    block_size, head_dim = layout.block_size, layout.head_dim
    if block_size % 32 or head_dim % 32:
        return False
    token, dim = torch.arange(block_size)[:, None], torch.arange(head_dim)[None, :]
    keys = token // 16 * (16 * head_dim) + dim // 2 * 32 + token % 16 * 2 + dim % 2
    values = dim // 16 * (16 * block_size) + token // 2 * 32 + dim % 16 * 2 + token % 2
    return torch.equal(layout.keys, keys) and torch.equal(layout.values, values)


def _dense(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).contiguous()
