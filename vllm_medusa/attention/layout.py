"""How a host packs keys and values inside one block of its paged cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vllm_medusa.errors import MedusaError

Write = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""(keys [n, Hkv, D], values [n, Hkv, D], key_cache, value_cache [blocks, Hkv, block, D], slots int64 [n]) -> None"""

_BASE = {1: 8, 2: 128, 4: 128}  # by bytes of an element: whole numbers below are exact, in float8 (e5m2) too


@dataclass(frozen=True)
class KeyLayout:
    """Where each element of a block stands: a permutation of the block's own elements, for keys and for values.

    A block holds `block_size` tokens of one KV head in `block_size * head_dim` consecutive elements. CPUs pack
    them for their matrix units: vLLM 0.32 keeps keys transposed for vector units ("vec"), and for AMX both keys and
    values in rows of pairs.

    Attributes:
        keys, values: int64 [block_size, head_dim], the place of (token, dimension).
    """

    keys: Tensor
    values: Tensor

    def __post_init__(self) -> None:
        assert self.keys.shape == self.values.shape and self.keys.ndim == 2

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.keys.shape[0]

    @property
    def head_dim(self) -> int:
        """Elements of one token's key."""
        return self.keys.shape[1]

    @classmethod
    def row_major(cls, block_size: int, head_dim: int) -> KeyLayout:
        """Nothing packed: token after token.

        >>> KeyLayout.row_major(2, 3).keys.tolist()
        [[0, 1, 2], [3, 4, 5]]
        """
        places = torch.arange(block_size * head_dim).view(block_size, head_dim)
        return cls(places, places)

    @cached_property
    def separable(self) -> bool:
        """Whether place(token, dimension) = token part + dimension part, which is what the compiled kernel reads."""
        return all(bool((p == p[:, :1] + p[:1] - p[0, 0]).all()) for p in (self.keys, self.values))


def learn_layout(
    write: Write, block_size: int, head_dim: int, dtype: torch.dtype, given: torch.dtype | None = None
) -> KeyLayout:
    """Find a host's packing by letting it store numbered elements and looking where they went.

    Args:
        write: the host's own "reshape and cache", see `Write`.
        block_size, head_dim: shape of a block.
        dtype: of the cache; a float, of whose bytes `write` may take another view.
        given: of the keys and values that `write` gets; None: that of the cache.

    Raises:
        MedusaError: the host does more than move elements around (a cache quantized in blocks, say).

    A host that does not pack:

    >>> def write(keys, values, key_cache, value_cache, slots):
    ...     key_cache[0].transpose(0, 1)[slots] = keys
    ...     value_cache[0].transpose(0, 1)[slots] = values
    >>> bool((learn_layout(write, 32, 64, torch.bfloat16).keys == KeyLayout.row_major(32, 64).keys).all())
    True
    """
    count = block_size * head_dim
    number = torch.arange(count)
    cache = torch.zeros(1, 1, 2 * block_size, head_dim, dtype=dtype)
    halves = cache.chunk(2, dim=2)  # as the host lays them out: keys, then values
    found = [torch.zeros(count, dtype=torch.int64) for _ in halves]
    weight, base = 1, _BASE[dtype.itemsize]
    while weight < count:  # digit by digit, since small dtypes cannot tell large numbers apart
        digit = (number // weight % base).to(given or dtype).view(block_size, 1, head_dim)
        write(digit, digit, halves[0], halves[1], torch.arange(block_size))
        for half, numbers in zip(halves, found, strict=True):
            numbers += half.reshape(-1).float().to(torch.int64) * weight
        weight *= base
    places = []
    for numbers in found:
        if not torch.equal(numbers.sort().values, number):
            raise MedusaError.of("kv_cache_dtype", str(dtype), "this cache does not store plain keys and values")
        places.append(torch.empty_like(numbers).scatter_(0, numbers, number).view(block_size, head_dim))
    return KeyLayout(*places)
