"""Which product a linear layer of a target gets, with vLLM's own layers and vLLM's own product beside ours."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers import utils

from vllm_medusa.host import linears, startup
from vllm_medusa.host.linears import Products
from vllm_medusa.kept import Kept
from vllm_medusa.linear.measure import Comparison
from vllm_medusa.linear.operator import ALWAYS, ROWS, linear

pytestmark = pytest.mark.skipif(linear() is None, reason="there is no C++ compiler here, so vLLM's product serves")


class Layer(nn.Module):
    """As much of a layer of vLLM's as its choice of a product looks at."""

    def __init__(self, outputs: int = 64, size: int = 96, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, size, generator=seeded()).to(dtype), requires_grad=False)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def loaded(products: Products, layer: Any, remove_weight: bool = True) -> Any:
    """The layer, after vLLM has chosen its product while weights are loaded."""
    with products.in_place():
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight)
    return layer


def found(quicker: Iterator[bool]) -> list[list[float]]:
    """A kept comparison in which ours is twice as quick where it says so, else half as quick."""
    own = {rows: 1.0 for rows in ROWS}
    return Comparison(own, {rows: 2.0 if better else 0.5 for rows, better in zip(ROWS, quicker, strict=True)}).to_json()


def kept_with(tmp_path: Path, kind: str, quicker: list[bool]) -> Kept:
    kept = Kept(tmp_path, {})
    kept.put(kind, found(iter(quicker)))
    return kept


def rows_agree(layer: Any, weight: torch.Tensor) -> None:
    for count in (1, 8, 40, 300):
        rows = torch.randn(count, weight.shape[1]).to(weight.dtype)
        torch.testing.assert_close(
            layer.cpu_linear(rows, layer.weight, None), nn.functional.linear(rows, weight), rtol=2e-2, atol=2e-2
        )


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many rows our product is handed."""
    handed: list[int] = []
    multiply = linear()
    assert multiply is not None

    def counting(rows: torch.Tensor, *rest: Any) -> torch.Tensor:
        handed.append(len(rows))
        return multiply(rows, *rest)

    monkeypatch.setattr(linears, "linear", lambda: counting)
    yield handed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forced_on_it_multiplies_with_the_weight_itself(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer(dtype=dtype)
    weight = layer.weight.detach().clone()
    with counted(monkeypatch) as handed:
        products = Products("medusa", Kept(tmp_path, {}))
        rows_agree(loaded(products, layer), weight)
    assert handed == [1, 8, 40, 300] and products.in_words() == "our matrix products"
    layer.weight.data.zero_()  # a new weight in the same place is used at once
    assert not layer.cpu_linear(torch.ones(2, 96, dtype=dtype), layer.weight, None).any()


def test_turned_off_vllm_chooses(tmp_path: Path) -> None:
    layer, plain = Layer(), Layer()
    loaded(Products("vllm", Kept(tmp_path, {})), layer)
    utils.dispatch_cpu_unquantized_gemm(plain, True)
    assert layer.weight.shape == plain.weight.shape and not hasattr(layer, "bare_weight")


def test_one_that_is_slower_for_some_rows_never_takes_the_place_of_a_packed_one(tmp_path: Path) -> None:
    """vLLM packs a weight and drops it: there is room for one of the two."""
    probe = Layer()
    utils.dispatch_cpu_unquantized_gemm(probe, True)
    if probe.weight.numel():
        pytest.skip("vLLM packs no float32 weights on this processor")
    kept = kept_with(tmp_path, "64x96 float32", [True] * 5 + [False] * 4)
    layer, products = Layer(), Products("auto", kept)
    loaded(products, layer)
    assert layer.weight.numel() == 0 and products.masks == {"64x96 float32": 0}
    assert "vLLM's matrix products" in products.in_words()


def test_an_unembedding_keeps_both_and_takes_the_quicker_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps its weight, for the embedding: each number of rows gets what is quicker for it."""
    weight = Layer().weight.detach().clone()
    with counted(monkeypatch) as handed:
        kept = kept_with(tmp_path, "64x96 float32", [True] * 5 + [False] * 4)
        layer = loaded(Products("auto", kept), Layer(), remove_weight=False)
        rows_agree(layer, weight)
    assert handed in ([1, 8], [1, 8, 40, 300])  # in the second case vLLM packs nothing here, and the mask decides


def test_measured_once_for_each_kind_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def compare(weight: torch.Tensor, other: Any) -> Comparison:
        asked.append(tuple(weight.shape))
        return Comparison.from_json(found(iter([True] * len(ROWS))))

    monkeypatch.setattr(linears, "compare", compare)
    for _ in range(2):  # two starts
        products = Products("auto", Kept(tmp_path, {}))
        with products.in_place():
            for outputs in (64, 64, 32):
                utils.dispatch_cpu_unquantized_gemm(Layer(outputs), True)
        assert products.masks == {"64x96 float32": ALWAYS, "32x96 float32": ALWAYS}
    assert asked == [(64, 96), (32, 96)]


def test_other_layers_get_vllms_choice(tmp_path: Path) -> None:
    """After loading, and where loading failed: an engine without trees may follow in the same process."""
    with pytest.raises(RuntimeError, match="loading failed"), Products("medusa", Kept(tmp_path, {})).in_place():
        raise RuntimeError("loading failed")
    later = Layer()
    utils.dispatch_cpu_unquantized_gemm(later, True)
    assert not hasattr(later, "bare_weight")


def test_loaded_again_a_layer_keeps_its_product_and_its_memory(tmp_path: Path) -> None:
    """Compiled graphs hold on to the memory that they were made with, while a reload brings new parameters."""
    layer = loaded(Products("medusa", Kept(tmp_path, {})), Layer())
    memory, old = layer.bare_weight.data_ptr(), layer.weight
    layer.weight = nn.Parameter(torch.full_like(old, 2.0), requires_grad=False)
    utils.dispatch_cpu_unquantized_gemm(layer, True)
    assert layer.bare_weight.data_ptr() == memory == layer.weight.data_ptr()
    assert (layer.cpu_linear(torch.ones(1, 96), layer.weight, None) == 192.0).all() and (old == 2.0).all()


@pytest.mark.slow
def test_a_second_start_measures_two_sizes(tiny_medusa: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first start measures all sizes within its bound; the next one only how it compares with the first."""
    runner = tiny_medusa.runner
    times: list[int] = []
    time_step = startup._time_step

    def counting(runner: Any, size: int) -> float:
        times.append(size)
        return time_step(runner, size)

    monkeypatch.setattr(startup, "_time_step", counting)
    first = dict(startup.time_steps(runner, 64, Kept(tmp_path, {})))
    assert set(times) == set(first) == {size for size in startup.STEP_SIZES if size <= 64}
    times.clear()
    monkeypatch.setattr(startup, "MOST_SURPRISE", math.inf)  # this machine may have changed its pace
    second = dict(startup.time_steps(runner, 64, Kept(tmp_path, {})))
    assert set(times) == set(startup.CHECKED) and set(second) == set(first)
    times.clear()
    monkeypatch.setattr(startup, "MOST_SURPRISE", 0.0)  # a machine of another kind: nothing kept is believed
    startup_again = dict(startup.time_steps(runner, 64, Kept(tmp_path, {})))
    assert set(times) == set(startup_again) == set(first)
    monkeypatch.setattr(startup, "MOST_SECONDS", 0.0)
    times.clear()
    assert len(dict(startup.time_steps(runner, 64, Kept(None, {})))) == 3
