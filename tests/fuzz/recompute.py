"""Keys and values of cached blocks against a recomputation by Hugging Face's model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Both sides compute in float32 and round differently: 2e-5 of the largest value or less. A wrong token or position
# differs as much as the values are large.
CLOSE = 2e-3
_ARGUMENTS = ("num_cached_blocks", "num_full_blocks", "block_size")  # of the host's `cache_full_blocks`


class CachedBlocks:
    """What the prefix cache of an engine holds, and what it should hold."""

    def __init__(self, model: Path, runner: Any, pool: Any) -> None:
        """Remember from now on which tokens each cached block stands for."""
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.runner, self.pool = runner, pool
        self.prefixes: dict[Any, tuple[int, ...]] = {}
        self.known: dict[int, Any] = {}  # blocks already found right, with their hash
        original = pool.cache_full_blocks

        def cache_full_blocks(request: Any, blocks: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(request, blocks, *args, **kwargs)
            said = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
            first, full, size = (said[name] for name in _ARGUMENTS)
            for place in range(first, full):
                if blocks[place].block_hash is not None:
                    self.prefixes[blocks[place].block_hash] = tuple(request.all_token_ids[: (place + 1) * size])
                    self.known.pop(blocks[place].block_id, None)
            return result

        pool.cache_full_blocks = cache_full_blocks

    def forget(self) -> None:
        """Drop the whole cache."""
        self.pool.reset_prefix_cache()
        self.known.clear()

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """What the model says after these tokens [V]."""
        return self.all_logits(tokens)[-1]

    @torch.inference_mode()
    def all_logits(self, tokens: Sequence[int]) -> Tensor:
        """What it says after each of them [T, V]."""
        found: Tensor = self.model(torch.tensor([list(tokens)])).logits[0]
        return found

    def group_of(self, block: Any) -> int:
        """The KV cache group of a cached block."""
        from vllm.v1.core.kv_cache_utils import get_group_id

        return int(get_group_id(block.block_hash))

    def check(self, most: int | None) -> tuple[int, str]:
        """Recompute cached blocks that were not checked before.

        Args:
            most: prefixes to recompute, the longest first; None: all.

        Returns:
            How many blocks were compared, and what is wrong.
        """
        found = [block for block in self.pool.blocks if block.block_hash is not None and not block.is_null]
        fresh = [block for block in found if self.known.get(block.block_id) != block.block_hash]
        prefixes = sorted({self.prefixes[block.block_hash] for block in fresh}, key=len, reverse=True)
        chains: list[tuple[int, ...]] = []
        for prefix in prefixes:
            if not any(chain[: len(prefix)] == prefix for chain in chains):
                chains.append(prefix)
        chains = chains[:most]
        if not chains:
            return 0, ""
        truth = self._recompute(chains)
        count = 0
        for block in fresh:
            prefix = self.prefixes[block.block_hash]
            row = next((i for i, chain in enumerate(chains) if chain[: len(prefix)] == prefix), None)
            if row is None:
                continue
            wrong = self._compare(block, prefix, [(keys[row], values[row]) for keys, values in truth])
            if wrong:
                return count, wrong
            self.known[block.block_id] = block.block_hash
            count += 1
        return count, ""

    @torch.inference_mode()
    def _recompute(self, chains: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [B, Hkv, T, D] by layer; shorter chains are padded behind, where nothing looks back from."""
        longest = max(map(len, chains))
        tokens = torch.tensor([[*chain, *[0] * (longest - len(chain))] for chain in chains])
        from transformers import DynamicCache

        cache: Any = DynamicCache()  # without a config: layers with a window keep everything too
        self.model(tokens, past_key_values=cache, use_cache=True)
        return [(layer.keys, layer.values) for layer in cache.layers]

    def _compare(self, block: Any, prefix: Sequence[int], truth: Sequence[tuple[Tensor, Tensor]]) -> str:
        group = self.group_of(block)
        layout = self.runner.tree_cache.layouts[group]
        size = layout.block_size
        layers = self.runner.compilation_config.static_forward_context
        for name in self.runner.kv_cache_config.kv_cache_groups[group].layer_names:
            number = int(name.split(".layers.")[1].split(".")[0])
            for what, half, places, told in zip(
                ("keys", "values"),
                layers[name].impl.halves(layers[name].kv_cache),
                (layout.keys, layout.values),
                truth[number],
                strict=True,
            ):
                found = half[block.block_id].flatten(1)[:, places]  # [Hkv, block, D]
                wanted = told[:, len(prefix) - size : len(prefix)]
                off = (found - wanted).abs().max().item()
                if not off <= CLOSE * wanted.abs().max().item():
                    rows = (found - wanted).abs().amax(dim=(0, 2)) > CLOSE * wanted.abs().max()
                    return (
                        f"{what} of layer {number} in block {block.block_id} (group {group}) are off by {off:.3g} of "
                        f"{wanted.abs().max().item():.3g}, rows {rows.nonzero()[:, 0].tolist()} of the block that "
                        f"ends a prefix of {len(prefix)} tokens"
                    )
        return ""
