"""The product of few rows: how near it is to the true result, and that a row's result is its own."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from vllm_medusa.linear.operator import ALWAYS, DTYPES, ROWS, has_product, linear, place_of

SIZES = [(1, 1), (3, 31), (97, 577), (66, 576), (64, 1536), (8, 4100)]  # outputs, inputs: odd ones, long ones


def product() -> Callable[[Tensor, Tensor, Tensor | None, int], Tensor]:
    operator = linear()
    if operator is None:
        pytest.skip("there is no C++ compiler here, so vLLM's product serves")
    return operator


def layer(outputs: int, size: int, dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(outputs + size + rows)
    made = [torch.randn(shape, generator=generator) for shape in ((rows, size), (outputs, size), (outputs,))]
    return tuple(tensor.to(dtype) for tensor in made)  # type: ignore[return-value]


def exact(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.linear(rows.double(), weight.double(), bias.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "size"), SIZES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 17, 200])
def test_no_further_from_the_true_result_than_torchs(dtype: torch.dtype, outputs: int, size: int, count: int) -> None:
    """In short formats all that may differ is the last rounding: both round a sum in float32, and so does the truth.

    In float32 the order of the sum decides. Rounding errors of n terms grow as the square root of n; 8 units of the
    last place of the largest partial sums are far above what any order gives here, and far below a wrong term.
    """
    rows, weight, bias = layer(outputs, size, dtype, count)
    true = exact(rows, weight, bias)
    ours = (product()(rows, weight, bias, ALWAYS).double() - true).abs()
    theirs = (functional.linear(rows, weight, bias).double() - true).abs()
    if dtype == torch.float32:
        scale = rows.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)[None]
        assert (ours <= 8 * torch.finfo(dtype).eps * scale.clamp(min=1.0)).all()
    else:
        rounded = (true.to(dtype).double() - true).abs()  # the nearest number of the format
        assert (ours <= rounded + 1e-5 * true.abs().clamp(min=size**0.5)).all()
        assert ours.mean() <= theirs.mean() * 1.01


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "size"), SIZES)
def test_a_rows_result_does_not_depend_on_the_others(dtype: torch.dtype, outputs: int, size: int) -> None:
    rows, weight, bias = layer(outputs, size, dtype, 130)
    alone = torch.cat([product()(row[None], weight, bias, ALWAYS) for row in rows])
    for count in (2, 3, 4, 5, 6, 7, 8, 9, 16, 33, 128, 130):
        assert torch.equal(product()(rows[:count], weight, bias, ALWAYS), alone[:count]), count
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(threads, 2))  # another share of the columns
    try:
        assert torch.equal(product()(rows, weight, bias, ALWAYS), alone)
    finally:
        torch.set_num_threads(threads)


def test_rows_of_any_shape_and_stride() -> None:
    weight, rows = torch.randn(5, 40), torch.randn(3, 2, 80)
    torch.testing.assert_close(
        product()(rows[..., ::2], weight, None, ALWAYS), functional.linear(rows[..., ::2], weight), rtol=1e-5, atol=1e-5
    )
    assert product()(rows[:0, :, :40], weight, None, ALWAYS).shape == (0, 2, 5)


def test_not_a_number_stays_in_its_row() -> None:
    rows, weight, bias = layer(64, 100, torch.bfloat16, 9)
    clean = product()(rows, weight, bias, ALWAYS)
    rows[4, 3] = float("nan")
    spoilt = product()(rows, weight, bias, ALWAYS)
    assert spoilt[4].isnan().all()
    assert torch.equal(spoilt[[0, 1, 2, 3, 5, 6, 7, 8]], clean[[0, 1, 2, 3, 5, 6, 7, 8]])


@pytest.mark.parametrize("count", [1, 2, 3, 64, 128, 129, 1000])
def test_a_mask_says_for_how_many_rows(count: int) -> None:
    """Where its bit is 0 the result is torch's to the bit; where it is 1, ours."""
    rows, weight, bias = layer(33, 577, torch.float32, count)
    bit = 1 << place_of(count)
    assert torch.equal(product()(rows, weight, bias, ALWAYS & ~bit), functional.linear(rows, weight, bias))
    assert torch.equal(product()(rows, weight, bias, bit), product()(rows, weight, bias, ALWAYS))
    assert ALWAYS.bit_length() == len(ROWS)


def test_what_does_not_fit_is_refused() -> None:
    rows, weight = torch.randn(2, 8), torch.randn(4, 8)
    for wrong in (torch.randn(2, 9), rows.bfloat16()):
        with pytest.raises(RuntimeError, match="do not fit"):
            product()(wrong, weight, None, ALWAYS)
    with pytest.raises(RuntimeError, match="bias"):
        product()(rows, weight, torch.randn(8)[::2], ALWAYS)
    assert has_product(weight) and not has_product(weight.T) and not has_product(weight.double())


def test_in_a_compiled_graph() -> None:
    multiply = product()
    rows, weight, _ = layer(33, 64, torch.float32, 5)
    compiled = torch.compile(lambda x, w: multiply(x * 2, w, None, ALWAYS) + 1, dynamic=True, fullgraph=True)
    for count in (5, 2, 3):
        expected = functional.linear(rows[:count] * 2, weight) + 1
        torch.testing.assert_close(compiled(rows[:count], weight), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_with_less_than_this_processor_has() -> None:
    """On a processor with AVX-512 the same tests run without it, in a process that is told so as torch is."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip(f"this processor has {torch.backends.cpu.get_cpu_capability()}, no AVX-512 to do without")
    tests = ["-k", "torchs or others or number or mask", "-m", "not slow", __file__]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        env={**os.environ, "ATEN_CPU_CAPABILITY": "avx2"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout
