"""Random steps for the GPU's kernels, and the truth about them; torch alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Case:
    """One step of several requests with trees.

    Attributes:
        nodes, contexts: per request.
        heads: query heads and KV heads.
        stored: dtype of the cache; None: the queries'.
        scales: what stored keys and values are multiplied by, for all heads or for each.
        back: how many rows before it a node's parent may be; 1 makes chains.
        options: of the attention: softcap, sliding_window.
    """

    nodes: list[int]
    contexts: list[int]
    dtype: torch.dtype = torch.bfloat16
    heads: tuple[int, int] = (32, 8)
    head_size: int = 128
    block_size: int = 16
    stored: torch.dtype | None = None
    scales: tuple[list[float], list[float]] | None = None
    back: int = 16
    seed: int = 0
    options: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """A case on a device: what the kernel takes (`arguments` by name), and what each row sees."""

    case: Case
    query: Tensor
    cache: Tensor
    arguments: dict[str, Tensor | int | float]
    starts: list[int]
    parents: list[list[int]]

    def attend(self, tree_attention, out: Tensor, **how) -> Tensor:
        """Run a kernel with the signature of `vllm_medusa.attention.triton.tree_attention`."""
        size = self.case.head_size
        keys, values = self.cache[..., :size], self.cache[..., size:]
        return tree_attention(self.query, keys, values, out, **self.arguments, **self.case.options, **how)

    def formula(self, dtype: torch.dtype) -> Tensor:
        """The attention formula as it is written, every operation in `dtype`."""
        case, parts = self.case, []
        group = case.heads[0] // case.heads[1]
        for request, context in enumerate(case.contexts):
            rows = slice(self.starts[request], self.starts[request + 1])
            keys, values = (x.to(dtype).repeat_interleave(group, 0) for x in self.text(request))
            scores = self.query[rows].to(dtype).transpose(0, 1) @ keys.mT * self.arguments["scale"]
            cap = case.options.get("softcap", 0.0)
            scores = torch.tanh(scores / cap) * cap if cap else scores
            weights = scores.masked_fill(~self.visible(request, context), -torch.inf).softmax(-1)
            parts.append((weights @ values).transpose(0, 1))
        return torch.cat(parts)

    def text(self, request: int) -> tuple[Tensor, Tensor]:
        """float32 [Hkv, L, D], a request's keys and values as they are stored, scaled."""
        case = self.case
        length = case.contexts[request] + case.nodes[request] + 1
        slots = torch.arange(length, device=self.cache.device)
        blocks = self.arguments["block_table"][request][slots // case.block_size].long()
        both = self.cache[blocks, :, slots % case.block_size].float().transpose(0, 1)
        halves = both[..., : case.head_size], both[..., case.head_size :]
        if case.scales is None:
            return halves
        scales = (torch.tensor(scale, device=both.device).view(-1, 1, 1) for scale in case.scales)
        return tuple(half * scale for half, scale in zip(halves, scales, strict=True))

    def visible(self, request: int, context: int) -> Tensor:
        """bool [rows, L]."""
        parents = self.parents[request]
        sees = torch.zeros(len(parents) + 1, context + 1 + len(parents), dtype=torch.bool)
        sees[:, : context + 1] = True
        depths = [0]
        for row, parent in enumerate(parents, start=1):
            sees[row] |= sees[parent]
            sees[row, context + row] = True
            depths.append(depths[parent] + 1)
        window = self.case.options.get("sliding_window", -1)
        if window > 0:
            depth = torch.tensor(depths)
            positions = torch.cat([torch.arange(context), context + depth])
            sees &= (context + depth)[:, None] - positions < window
        return sees.to(self.cache.device)


def build(case: Case, device: torch.device | str) -> Step:
    """Normal queries, keys and values; blocks in any order, NaN where no token lies (in float8 its largest number)."""
    generator = torch.Generator().manual_seed(case.seed)
    parents = [
        [int(torch.randint(max(0, n - case.back + 1), n + 1, (1,), generator=generator)) for n in range(count)]
        for count in case.nodes
    ]
    words = 1 if max(case.nodes) <= 64 else 2
    masks, depths, starts = [], [], [0]
    for tree in parents:
        own, depth = [0], [0]
        for node, parent in enumerate(tree):
            own.append(own[parent] | 1 << node)
            depth.append(depth[parent] + 1)
        masks += [[_signed(mask >> 64 * word) for word in range(words)] for mask in own]
        depths += depth
        starts.append(starts[-1] + len(own))
    lengths = [context + count + 1 for context, count in zip(case.contexts, case.nodes, strict=True)]
    counts = [-(-length // case.block_size) for length in lengths]
    order = torch.randperm(sum(counts), generator=generator).split(counts)
    table = torch.full((len(counts), max(counts)), 2**30, dtype=torch.int32)
    cache = torch.full((sum(counts), case.heads[1], case.block_size, 2 * case.head_size), torch.nan, device=device)
    normal = torch.Generator(device).manual_seed(case.seed)
    for request, (blocks, length) in enumerate(zip(order, lengths, strict=True)):
        table[request, : len(blocks)] = blocks
        slots = torch.arange(length)
        told = torch.randn(length, case.heads[1], 2 * case.head_size, device=device, generator=normal)
        cache[blocks[slots // case.block_size].to(device), :, (slots % case.block_size).to(device)] = told
    query = torch.randn(starts[-1], case.heads[0], case.head_size, device=device, generator=normal)
    arguments: dict[str, Tensor | int | float] = {
        "block_table": table.to(device),
        "context_lens": torch.tensor(case.contexts, dtype=torch.int32, device=device),
        "query_start_loc": torch.tensor(starts, dtype=torch.int32, device=device),
        "ancestors": torch.tensor(masks, device=device),
        "depths": torch.tensor(depths, dtype=torch.int32, device=device),
        "max_rows": max(case.nodes) + 1,
        "max_context": max(case.contexts),
        "scale": case.head_size**-0.5,
    }
    if case.scales is not None:
        for name, scale in zip(("key_scale", "value_scale"), case.scales, strict=True):
            arguments[name] = torch.tensor(scale, device=device)
    return Step(case, query.to(case.dtype), cache.to(case.stored or case.dtype), arguments, starts, parents)


def _signed(word: int) -> int:
    """The lowest 64 bits as an int64 holds them."""
    word &= 2**64 - 1
    return word - 2**64 if word >= 2**63 else word
