"""Random steps for the attention tests: trees, a paged cache written by the host's own packer, and the truth."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.attention.cpu import KeyLayout, TreeAttentionPlan, learn_layout
from vllm_medusa.attention.inputs import LayerInputs
from vllm_medusa.attention.layout import Write
from vllm_medusa.attention.reference import reference_attention
from vllm_medusa.tree.topology import Tree, num_words


def isa_of(dtype: torch.dtype) -> str:
    """How the host packs blocks of a multiple of 32 tokens in this format on this machine: it goes by AMX."""
    return "amx" if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else "vec"


def random_tree(num_nodes: int, seed: int, reach_back: int = 128) -> Tree:
    """Any tree; a small `reach_back` makes it deep."""
    generator = torch.Generator().manual_seed(seed)
    parents = [
        int(torch.randint(max(0, node + 1 - reach_back), node + 1, (1,), generator=generator))
        for node in range(num_nodes)
    ]
    return Tree(tuple(parents))


def host_writer(isa: str) -> Write:
    """The host's writer for one packing."""
    from vllm import _custom_ops as ops

    def write(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa)

    return write


FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SCALES = (0.5, 0.0625)  # of keys and values: to divide by them and multiply again rounds nothing


def float8_writer(isa: str, kind: str, scales: tuple[float, float] = (1.0, 1.0)) -> Write:
    """The host's writer for a float8 cache, which it takes as bytes."""
    from vllm import _custom_ops as ops

    def write(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        as_bytes = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
        ops.cpu_attn_reshape_and_cache(keys, values, *as_bytes, slots, isa, *scales, kind)

    return write


@cache
def layout_of(isa: str, block_size: int, head_size: int, dtype: torch.dtype) -> KeyLayout:
    """Learnt once per kind of cache."""
    return learn_layout(host_writer(isa), block_size, head_size, dtype)


@dataclass
class Step:
    """One step of several requests.

    Attributes:
        trees, contexts: per request.
        query: [T, Hq, D].
        keys, values: per request [P + rows, Hkv, D], in order.
    """

    trees: list[Tree]
    contexts: list[int]
    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    block_size: int
    isa: str
    seed: int = 0

    @classmethod
    def random(
        cls,
        trees: list[Tree],
        contexts: list[int],
        *,
        heads: tuple[int, int] = (9, 3),
        head_size: int = 64,
        block_size: int = 128,
        dtype: torch.dtype = torch.float32,
        isa: str | None = None,
        seed: int = 0,
    ) -> Step:
        """Normal queries, keys and values; `heads` are (Hq, Hkv)."""
        generator = torch.Generator().manual_seed(seed)

        def normal(count: int, num_heads: int) -> Tensor:
            return torch.randn(count, num_heads, head_size, generator=generator).to(dtype)

        lengths = [context + tree.num_rows for tree, context in zip(trees, contexts, strict=True)]
        return cls(
            trees,
            contexts,
            normal(sum(tree.num_rows for tree in trees), heads[0]),
            [normal(length, heads[1]) for length in lengths],
            [normal(length, heads[1]) for length in lengths],
            block_size,
            isa or isa_of(dtype),
            seed,
        )

    def store(
        self, unused: float = torch.nan, write: Write | None = None, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(key cache, value cache, block table): every request's tokens in shuffled blocks.

        Args:
            unused: what unused slots hold.
            write: stands in for the host's writer of this packing.
            dtype: of the cache, in place of the query's.
        """
        dtype, write = dtype or self.query.dtype, write or host_writer(self.isa)
        _, kv_heads, head_size = self.keys[0].shape
        counts = [-(-len(keys) // self.block_size) for keys in self.keys]
        generator = torch.Generator().manual_seed(self.seed + 1)
        free = torch.randperm(sum(counts) + 3, generator=generator)
        cache = torch.full((len(free), kv_heads, 2 * self.block_size, head_size), unused, dtype=dtype)
        key_cache, value_cache = cache.chunk(2, dim=2)
        table = torch.full((len(counts), max(counts) + 1), 2**30, dtype=torch.int32)  # stale entries are not looked at
        for request, count in enumerate(counts):
            blocks, free = free[:count], free[count:]
            table[request, :count] = blocks
            slots = (blocks[:, None] * self.block_size + torch.arange(self.block_size)).flatten()
            length = len(self.keys[request])
            write(self.keys[request], self.values[request], key_cache, value_cache, slots[:length])
        return key_cache, value_cache, table

    @property
    def query_start_loc(self) -> Tensor:
        """int64 [R + 1]."""
        counts = torch.tensor([tree.num_rows for tree in self.trees])
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0))

    def plan(self, table: Tensor, **options: object) -> TreeAttentionPlan:
        """The plan of this step; options are further fields of it. The host is asked for a layout if none is given."""
        words = num_words(max(tree.num_nodes for tree in self.trees))
        ancestors = torch.zeros(len(self.query), words, dtype=torch.int64)
        for start, tree in zip(self.query_start_loc.tolist(), self.trees, strict=False):
            masks = torch.from_numpy(tree.ancestor_masks().view("int64"))
            ancestors[start : start + tree.num_rows, : masks.shape[1]] = masks
        head_size = self.query.shape[2]
        if "layout" not in options:
            options["layout"] = layout_of(self.isa, self.block_size, head_size, self.query.dtype)
        fields = {
            "block_table": table,
            "context_lens": torch.tensor(self.contexts),
            "query_start_loc": self.query_start_loc,
            "ancestors": ancestors,
            "depths": torch.tensor([depth for tree in self.trees for depth in tree.depths]),
            "scale": head_size**-0.5,
        }
        return TreeAttentionPlan(**{**fields, **options})  # type: ignore[arg-type]

    def run(self, **options: object) -> Tensor:
        """What the fast path says."""
        layer = LayerInputs(sinks=options.pop("sinks", None))  # type: ignore[arg-type]
        key_cache, value_cache, table = self.store()
        out = torch.full_like(self.query, torch.nan)
        return self.plan(table, **options).run(self.query, key_cache, value_cache, out, layer)

    def truth(self, dtype: torch.dtype = torch.float64, **options: Any) -> Tensor:
        """What the reference says, in `dtype`."""
        options = {"scale": self.query.shape[2] ** -0.5, **options}
        starts = self.query_start_loc.tolist()
        return torch.cat(
            [
                reference_attention(
                    self.query[starts[r] : starts[r + 1]], self.keys[r], self.values[r], tree, dtype=dtype, **options
                )
                for r, tree in enumerate(self.trees)
            ]
        )


def float8_step(
    trees: list[Tree], contexts: list[int], dtype: torch.dtype, kind: str
) -> tuple[Step, tuple[Tensor, Tensor, Tensor]]:
    """A step whose keys and values float8 holds exactly, and what `store` stores of it."""
    isa = "amx" if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else "vec"
    step = Step.random(trees, contexts, dtype=dtype, isa=isa)
    for part, scale in zip((step.keys, step.values), SCALES, strict=True):
        part[:] = [((x / scale).to(FLOAT8[kind]).float() * scale).to(dtype) for x in part]
    return step, step.store(unused=0.0, write=float8_writer(isa, kind, SCALES), dtype=FLOAT8[kind])
