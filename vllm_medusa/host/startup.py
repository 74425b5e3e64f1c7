"""What both model runners do before they serve: measure what steps and heads cost, and say in one line what serves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger

from vllm_medusa.host.ranks import agreed_seconds, is_first_rank
from vllm_medusa.kept import Kept
from vllm_medusa.proposer import MedusaProposer

logger = init_logger("vllm.medusa")  # below the host's own, so that its settings hold
STEP_SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # tokens in a step
MOST_SECONDS = 3.0  # that measuring steps may take, and heads
CHECKED, MOST_SURPRISE = (1, 8), 1.3  # sizes that tell whether kept times still hold: by ratios no further apart
_STEPS = "steps"  # the name by which their times are kept
HEADS_SIZES = (1, 2, 4, 8, 16, 32)  # requests, at which asking the heads is timed
# A GPU takes hundreds of tokens in the time of one; where that ends decides how many nodes pay.
MORE_ON_A_DEVICE = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def time_steps(runner: Any, most: int, kept: Kept) -> Iterator[tuple[int, float]]:
    """Seconds of the target's forward pass and unembedding at a few step sizes, `most` tokens at most.

    Attention and bookkeeping are missing from these times, so sizes that were never served look a little too cheap:
    they are tried once and then known. By the first rank's clock, as all of these times. Takes `MOST_SECONDS` at most,
    or two steps of each of three sizes. What an earlier start measured is taken again, once two sizes have told how
    this start compares with it.

    Args:
        runner: either runner of vLLM.
        most: tokens.
        kept: what earlier starts measured; gets what this one does.
    """
    sizes = _sizes(STEP_SIZES, most, runner.device)
    own = _read_times(kept.get(_STEPS))
    agreed = {size: agreed_seconds(own.get(size, 0.0)) for size in sizes}  # each rank keeps its own
    known = {size: seconds for size, seconds in agreed.items() if seconds}
    checks = [size for size in CHECKED if size in sizes and size in known]
    if checks and set(sizes) <= set(known):
        paces = [_least_of(runner, size, 3) / known[size] for size in checks]
        if max(paces) < MOST_SURPRISE * min(paces):
            for size in sizes:
                yield size, known[size] * min(paces)
            return
    found = {}
    began = time.perf_counter()
    for place, size in enumerate(_most_telling_first(sizes)):
        late = agreed_seconds(time.perf_counter() - began) > MOST_SECONDS  # by one clock, or ranks part ways
        if late and place >= 3:
            break
        found[size] = _least_of(runner, size, 2 if late else 4)
        yield size, found[size]
    kept.put(_STEPS, sorted(found.items()))
    kept.save()


def _read_times(table: Any) -> dict[int, float]:
    """Seconds by size from what was kept; nothing if that is no such table."""
    try:
        times = {int(size): float(seconds) for size, seconds in table or []}
    except (TypeError, ValueError):
        return {}
    return times if all(0.0 < seconds < math.inf for seconds in times.values()) else {}


def _least_of(runner: Any, size: int, times: int) -> float:
    return agreed_seconds(min(_time_step(runner, size) for _ in range(times)))


def _most_telling_first(sizes: Sequence[int]) -> list[int]:
    """The sizes in an order in which those that come first tell most about the others: ends, then middles of gaps.

    >>> _most_telling_first([1, 2, 4, 8, 16])
    [1, 16, 4, 2, 8]
    """
    ordered, gaps = [sizes[0], sizes[-1]] if len(sizes) > 1 else list(sizes), [(0, len(sizes) - 1)]
    while gaps:
        first, last = gaps.pop(0)
        if last - first > 1:
            middle = (first + last) // 2
            ordered.append(sizes[middle])
            gaps += [(first, middle), (middle, last)]
    return ordered


def time_heads(
    proposer: MedusaProposer, propose: Callable[[Tensor, Tensor], Any], most: int
) -> Iterator[tuple[int, float]]:
    """Seconds of `propose(hidden rows, roots)` for a few numbers of requests; builds what is built on first use."""
    heads = proposer.heads
    assert heads is not None, "load_model comes first"
    weight = next(heads.parameters())
    all_began = time.perf_counter()
    for size in _sizes(HEADS_SIZES, most, weight.device):
        if size > HEADS_SIZES[1] and agreed_seconds(time.perf_counter() - all_began) > MOST_SECONDS:
            return
        hidden = torch.zeros(size, heads.config.hidden_size, dtype=weight.dtype, device=weight.device)
        roots = torch.zeros(size, dtype=torch.int64, device=weight.device)
        for _ in range(3):
            began = time.perf_counter()
            propose(hidden, roots)
            _wait_for(weight.device)
            seconds = time.perf_counter() - began
        yield size, agreed_seconds(seconds)


def log_choices(
    proposer: MedusaProposer, runner: str, attention: str, sampler: str, products: str | None = None
) -> None:
    """One line that says what serves.

    Args:
        proposer: heads and settings.
        runner, attention, sampler: what runs steps, checks trees and draws tokens.
        products: what multiplies with the target's matrices, where there is a choice.
    """
    if not is_first_rank():
        return
    settings, heads = proposer.settings, proposer.heads
    logger.info(
        "Medusa: %s of up to %d nodes%s from %d heads%s (%s); %s, tree attention by %s, %s%s, %s candidates.",
        "dynamic trees" if settings.fixed_tree is None else "a fixed tree",
        settings.num_speculative_tokens,
        ", fewer under load," if settings.adaptive else "",
        heads.config.num_heads if heads is not None else 0,
        " and prompt lookup" if settings.prompt_lookup else "",
        settings.heads,
        runner,
        {"c++": "the C++ kernel"}.get(attention, attention),
        f"{products}, " if products else "",
        sampler,
        settings.draft_sample_method,
    )


def _sizes(usual: Sequence[int], most: int, device: torch.device) -> list[int]:
    more = MORE_ON_A_DEVICE if device.type != "cpu" else ()
    return [size for size in sorted({*usual, *more}) if size <= most]


@torch.inference_mode()
def _time_step(runner: Any, tokens: int) -> float:
    began = time.perf_counter()
    hidden, _ = runner._dummy_run(tokens, randomize_inputs=True)  # the same token everywhere would ask the same experts
    runner.model.compute_logits(hidden[:tokens])
    _wait_for(runner.device)
    return time.perf_counter() - began


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
