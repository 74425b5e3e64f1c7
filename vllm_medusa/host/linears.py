"""Our product of few rows in the place of vLLM's, in each linear layer of a target where it is quicker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers import utils

from vllm_medusa.kept import Kept
from vllm_medusa.linear.measure import Comparison, compare
from vllm_medusa.linear.operator import ALWAYS, Linear, has_product, linear, place_of

ADDITIONAL_KEY = "medusa_products"  # in VllmConfig.additional_config, which vLLM's compilation caches are keyed by


@dataclass
class Products:
    """Which product serves each kind of matrix of a target.

    Attributes:
        ask: "auto" measures, "medusa" takes ours wherever it can be, "vllm" never.
        kept: what an earlier start measured.
        masks: for each kind, [outputs, inputs] and number format, at how many rows ours serves (see `ROWS`).
        seen: what was measured, or kept, for each kind.
    """

    ask: str
    kept: Kept
    masks: dict[str, int] = field(default_factory=dict)
    seen: dict[str, Comparison] = field(default_factory=dict)
    _theirs: dict[str, _TheirProduct] = field(default_factory=dict)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While weights are loaded: layers get their product from us, now and whenever they are loaded again."""
        global _loading
        if self.ask == "vllm" or linear() is None:
            yield
            return
        _install()
        before, _loading = _loading, self
        try:
            yield
        finally:
            _loading = before
        self.kept.save()

    def give(self, original: Callable[..., None], layer: Any, remove_weight: bool) -> None:
        """Give a layer its product; arguments as of vLLM's `original` function, which does the same."""
        operator = linear()
        assert operator is not None
        layer.medusa_products = self
        self._give(operator, original, layer, remove_weight)

    def in_words(self) -> str:
        """What serves and why, for the line at start-up."""
        if not self.masks:
            return "vLLM's matrix products"
        ours = sum(mask > 0 for mask in self.masks.values())
        which = (
            "our matrix products"
            if ours == len(self.masks)
            else f"our matrix products for {ours} of {len(self.masks)} shapes"
        )
        if not ours:
            return "vLLM's matrix products, as quick as ours"
        ratios = [found.ratio(8) for kind, found in self.seen.items() if self.masks[kind] > 0]
        return which + (f" (vLLM's take up to {max(ratios):.1f} times as long for 8 rows)" if ratios else "")

    def _give(self, operator: Linear, original: Callable[..., None], layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.is_meta or not has_product(weight):
            original(layer, remove_weight)
            return
        # Whether vLLM packs is a matter of the kind: asked of one matrix, not of each layer's anew.
        theirs = self._theirs.setdefault(_kind(weight), _TheirProduct(original, weight.shape, weight.dtype))
        mask = ALWAYS if self.ask == "medusa" else self._mask(weight, theirs)
        if mask != ALWAYS and remove_weight and theirs.is_packed:
            mask = 0  # vLLM's is made of a copy, and a layer keeps one
        self.masks[_kind(weight)] = mask
        if mask == ALWAYS or (mask and not theirs.is_packed):
            # vLLM's parameters intercept, in Python, every operator that is handed one: microseconds each. Not this.
            known = getattr(layer, "bare_weight", None)
            if known is not None and known.shape == weight.shape and known.dtype == weight.dtype:
                known.copy_(weight.data)  # loaded again: compiled graphs, and vLLM's reload, hold on to this memory
                weight.data = known
            else:
                layer.bare_weight = weight.data
            layer.cpu_linear = lambda x, weight, bias: operator(x, layer.bare_weight, bias, mask)
            return
        original(layer, remove_weight)
        if mask:
            packed = layer.cpu_linear

            def either(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                ours = mask >> place_of(x.numel() // x.shape[-1]) & 1
                return operator(x, weight, bias, ALWAYS) if ours else packed(x, weight, bias)

            layer.cpu_linear = either

    def _mask(self, weight: Tensor, theirs: _TheirProduct) -> int:
        kind = _kind(weight)
        if kind not in self.seen:
            found = Comparison.from_json(self.kept.get(kind)) or compare(weight, theirs.of)
            self.kept.put(kind, found.to_json())
            self.seen[kind] = found
        found = self.seen[kind]
        return ALWAYS if found.never_slower and theirs.is_packed else found.mask


_loading: Products | None = None  # whose weights are being loaded


def _install() -> None:
    """Let layers get their product from us, those of a target with trees alone.

    vLLM gives each linear layer on a CPU its product by `dispatch_cpu_unquantized_gemm`, which every layer looks up
    anew when weights are loaded, and when they are loaded again. Remove when vLLM lets a plugin register a product.
    """
    original = utils.dispatch_cpu_unquantized_gemm
    if getattr(original, "is_medusas", False):
        return

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        products: Products | None = getattr(layer, "medusa_products", None) or _loading
        if products is None:
            original(layer, remove_weight)
        else:
            products.give(original, layer, remove_weight)

    dispatch_cpu_unquantized_gemm.is_medusas = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


class _TheirProduct:
    """vLLM's product, tried on layers of our own."""

    def __init__(self, original: Callable[..., None], shape: torch.Size, dtype: torch.dtype) -> None:
        self._original, self._shape, self._dtype = original, shape, dtype

    @cached_property
    def is_packed(self) -> bool:
        """It computes with a copy of the weight, not with the weight."""
        return bool(self._layer(torch.zeros(self._shape, dtype=self._dtype)).weight.numel() == 0)

    def of(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        """The product of one matrix, without a bias."""
        layer = self._layer(weight)
        return lambda rows: layer.cpu_linear(rows, layer.weight, None)

    def _layer(self, weight: Tensor) -> Any:
        layer = nn.Module()
        layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self._original(layer, True)
        return layer


def _kind(weight: Tensor) -> str:
    outputs, size = weight.shape
    return f"{outputs}x{size} {str(weight.dtype).removeprefix('torch.')}"
