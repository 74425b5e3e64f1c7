"""What serves on a GPU gives the tokens of plain decoding, by Triton's interpreter: our kernels inside vLLM's engine.

The host has its Triton attention here, with the cache of a GPU. Whatever a GPU adds is not checked: machine code,
streams, real CUDA graphs (a recorded step calls its kernels anew, with the addresses and numbers of the recording).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import v1_device_runs
from device_runs import greedy, seeded
from interpreter import interpreted

pytestmark = pytest.mark.slow  # engines start
Ask = Callable[..., Any]
LENGTHS = [1, 9, 33, 60]
ON_GPU = {"attention": "TRITON_ATTN", "is_async": True}
GRAPHS = {"graphs": [9, 18, 36, 128], "max_num_seqs": 4}  # trees of one, two and four requests; steps with prompts


def test_beside_the_hosts_own_kernel(ask: Ask) -> None:
    """Prompts and plain decoding by vLLM's Triton kernel, which is interpreted too."""
    run = ask("hosts_kernel", [5, 18], greedy(2, 4), is_async=True)
    assert run["differences"] == [] and run["report"]["kernel"] == "triton" and run["checked"] > 1


def test_whatever_shares_a_step(ask: Ask) -> None:
    """Pieces of prompts beside trees, trees cut at max_model_len, preemption; greedy and sampled."""
    limits = {"max_model_len": 64, "max_num_batched_tokens": 40, "num_gpu_blocks_override": 6}
    run = ask("compare", [30, 24, 29, 52], greedy(4, 34), **ON_GPU, **limits)
    assert run["differences"] == [] and run["preempted"] and run["length"] > 1.7
    run = ask("compare", LENGTHS[1:3], seeded(2, 6, logprobs=2, frequency_penalty=0.5), **ON_GPU, change="watched")
    assert run["differences"] == [] and run["length"] > 1.2


def test_recorded_steps(ask: Ask) -> None:
    """As many requests as a graph has, and fewer; steps with prompts too: what fills up a step changes no token."""
    params = [{"temperature": 0, "max_tokens": tokens} for tokens in (6, 8, 11, 14)]
    run = ask("compare", LENGTHS, params, **ON_GPU, **GRAPHS)
    assert run["differences"] == [] and run["replays"] > 5 and run["filled"] and run["length"] > 1.7


@pytest.mark.parametrize("fault", ["no_commit", "old_rows", "old_context"])
def test_these_faults_show(ask: Ask, fault: str) -> None:
    """In recorded steps."""
    assert ask("compare", LENGTHS[:3], greedy(3, 8), change=fault, **ON_GPU, **GRAPHS)["differences"]


def test_widths_by_load_in_recorded_steps(ask: Ask) -> None:
    """Steps of three widths, each with graphs of its own, down to none."""
    table = [(1, 2, 8), (3, 3, 3), (4, 4, 0)]
    medusa = {"num_speculative_tokens_per_batch_size": table}
    params = [{"temperature": 0, "max_tokens": tokens} for tokens in (4, 8, 12, 18)]
    run = ask("compare", LENGTHS, params, medusa=medusa, graphs=[4, 8, 12, 18], max_num_seqs=4, **ON_GPU)
    assert run["differences"] == [] and run["replays"] > 5 and run["length"] > 1.2


def test_windows_and_soft_caps(ask: Ask, capped_model: Path, tiny_heads: Path) -> None:
    """Two KV cache groups; a node's window ends where its depth says."""
    run = ask("compare", [9, 60], greedy(2, 10), pair=(capped_model, tiny_heads), **ON_GPU)
    assert run["differences"] == [] and run["length"] > 1.5


def test_the_prefix_cache_holds_what_was_committed(ask: Ask) -> None:
    wrong, cached = ask("prefix_cache", **ON_GPU)
    assert wrong == [] and cached == [32, 64]


def test_kernels_are_looked_at_before_serving(ask: Ask) -> None:
    assert ask("looks_at_kernels", attention="TRITON_ATTN", error=0.0) == "serves"
    assert "tree attention is off by 0.5" in ask("looks_at_kernels", attention="TRITON_ATTN", error=0.5)


def test_another_attention_is_refused(ask: Ask) -> None:
    """By the name of the key, with those that would do."""
    message = ask("refuses_attention")
    assert "attention_backend='TRITON_ATTN'" in message and "FLASH_ATTN" in message


@pytest.fixture(scope="module")
def ask_v1(tiny_model: Path, tiny_heads: Path) -> Iterator[Ask]:
    """The same on Model Runner V1."""
    with interpreted(v2=False) as child:

        def run(name: str, *args: Any, **options: Any) -> Any:
            function = getattr(v1_device_runs, name)
            return child.submit(function, tiny_model, tiny_heads, *args, **options).result(timeout=300)

        yield run


def test_on_model_runner_v1(ask_v1: Ask) -> None:
    """Trees stand between prompts in pieces and requests without drafts; greedy and with seeds."""
    ask_v1("looks_at_kernels")
    run = ask_v1("compare", [1, 60, 9, 33], [*greedy(2, 12), *seeded(2, 8)])
    assert run["differences"] == [] and run["length"] > 1.4 and run["kernel"] == "triton"


def test_a_fault_shows_on_model_runner_v1(ask_v1: Ask) -> None:
    assert ask_v1("compare", [9, 33], greedy(2, 12), fault="no_commit")["differences"]
