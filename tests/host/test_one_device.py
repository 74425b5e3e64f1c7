"""All tensors of a step on Model Runner V2 are on one device: a GPU refuses what a CPU lets pass.

Our code for the device runs here on "meta" tensors, which have a shape and a device and no values. So what would wait
for a value fails too. Only the host's kernels are left out, and ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from one_device import ELSEWHERE, Launches, OneDevice
from torch import Tensor

from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.proposer import MedusaProposer
from vllm_medusa.tree.tensor_lookup import TensorLookups
from vllm_medusa.tree.topology import Tree

SLOTS, NODES, HIDDEN, VOCAB, LONGEST = 4, 8, 16, 50, 40


def there(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor on the other device."""
    return torch.zeros(*shape, dtype=dtype, device=ELSEWHERE)


def a_batch() -> Any:
    """Three of the host's requests, two with drafts (8 and 3), one with a prompt of 5 tokens."""
    rows, scheduled = np.array([9, 4, 1]), np.array([9, 4, 5], dtype=np.int32)
    starts = np.concatenate([[0], np.cumsum(scheduled)]).astype(np.int32)
    count, tokens, logits = 3, int(starts[-1]), int(rows.sum())
    return SimpleNamespace(
        num_reqs=count, num_tokens=tokens, num_draft_tokens=11, num_draft_tokens_per_req=np.array([8, 3, 0]),
        num_scheduled_tokens=scheduled, query_start_loc=there(count + 1, dtype=torch.int32), query_start_loc_np=starts,
        req_ids=["a", "b", "c"],
        idx_mapping=there(count), idx_mapping_np=np.arange(count), seq_lens=there(count, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.full((count,), LONGEST, dtype=torch.int32), positions=there(tokens),
        input_ids=there(tokens, dtype=torch.int32), logits_indices=there(logits),
        is_prefilling_np=np.array([0, 0, 1]) > 0, cu_num_logits=there(count + 1, dtype=torch.int32),
        expanded_idx_mapping=there(logits), expanded_local_pos=there(logits, dtype=torch.int32),
    )  # fmt: skip


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Slots with texts, and rows for attention."""
    from vllm_medusa.host.v2.rows import RowBuffers
    from vllm_medusa.host.v2.slots import SlotTrees

    states = SimpleNamespace(
        max_num_reqs=SLOTS,
        prefill_len=SimpleNamespace(gpu=there(SLOTS, dtype=torch.int32)),
        all_token_ids=SimpleNamespace(gpu=there(SLOTS, 64, dtype=torch.int32)),
        total_len=SimpleNamespace(gpu=there(SLOTS, dtype=torch.int32)),
    )
    made = SlotTrees(states, NODES, ELSEWHERE)
    made.rows = RowBuffers(64, SLOTS, NODES, ELSEWHERE)
    made.lookups = TensorLookups(SLOTS, NODES, ELSEWHERE)
    return made


@pytest.fixture(autouse=True)
def one_device() -> Iterator[None]:
    """Around each test."""
    with OneDevice():
        yield


def a_proposer(fixed: Tree | None = None, **heads_like: Any) -> MedusaProposer:
    """Heads on the other device, tied to a target there."""
    sizes: dict[str, Any] = {"num_heads": 3, "num_layers": 1, "hidden_size": HIDDEN, "vocab_size": VOCAB, "top_k": 5}
    heads = MedusaHeads(HeadsConfig(**sizes, **heads_like)).to(ELSEWHERE)
    heads.bind(there(VOCAB, HIDDEN, dtype=torch.float32), there(VOCAB, HIDDEN, dtype=torch.float32))
    heads.freeze()
    proposer = MedusaProposer.__new__(MedusaProposer)
    proposer.settings = SimpleNamespace(num_speculative_tokens=NODES)  # type: ignore[assignment]
    proposer.fixed_tree, proposer.heads, proposer._are_weights_new = fixed, heads.eval(), False
    return proposer


class Sampler:
    """Stands for the host's, which draws a token a row."""

    compute_nans, logprobs_mode, logits_processors = False, "raw_logprobs", ()
    thinking_budget_state = SimpleNamespace(enabled=False)
    req_states = SimpleNamespace(prefill_len=SimpleNamespace(gpu=None))

    def __init__(self, *, greedy: bool) -> None:
        temperature = np.full(SLOTS, 0.0 if greedy else 1.0)
        self.sampling_states = SimpleNamespace(temperature=SimpleNamespace(np=temperature))
        self.needs_logits_processing = np.full(SLOTS, not greedy)

    def sample(self, logits: Tensor, slots: Tensor, *args: Any, return_logprobs: bool = False) -> Any:
        assert {tensor.device for tensor in (logits, slots, *args) if isinstance(tensor, Tensor)} == {ELSEWHERE}
        return there(len(logits), dtype=torch.int32), None

    def get_logprobs_dims(self, _: Any) -> None:
        return None


@pytest.mark.parametrize(
    "heads_like",
    [
        {},
        {"root_conditioned": True, "draft_vocab_size": 20},
        {"unembedding": "per_head"},
        {"trunk_size": 8, "root_conditioned": True},
    ],
    ids=["plain", "reduced", "own", "trunk"],
)
@pytest.mark.parametrize("fixed", [None, Tree((0, 0, 1))], ids=["dynamic", "fixed"])
def test_drafts(trees: Any, fixed: Tree | None, heads_like: dict[str, Any]) -> None:
    slots = there(3)
    with torch.inference_mode():
        expected = trees.expected(slots, LONGEST)
        hidden = there(3, HIDDEN, dtype=torch.float32)
        drafted = a_proposer(fixed, **heads_like).propose_tensors(hidden, there(3), expected)
        trees.put(slots, drafted)
    assert all(part.device == ELSEWHERE for part in drafted) and drafted.tokens.shape == (3, NODES)


@pytest.fixture
def whole_step(trees: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs one step of trees, from laying them to counting what was accepted."""
    from vllm_medusa.host.v2 import counting, device_cache, sampling
    from vllm_medusa.host.v2.clock import StageClock
    from vllm_medusa.host.v2.learning import Learning

    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: None)
    monkeypatch.setattr(device_cache, "build_attn_metadata", lambda **_: {"layer": "the host's"})
    monkeypatch.setattr(sampling, "get_num_sampled_and_rejected", lambda *_: (there(3), there(3)))
    guard: Any = SimpleNamespace(watch=lambda *_: None)
    counts = counting.DeviceCounts(trees, guard, Learning(), 5, ELSEWHERE)
    moved: list[Any] = []
    cache = device_cache.DeviceTreeCache.__new__(device_cache.DeviceTreeCache)
    cache.rows, cache._config, cache.image_ranges = trees.rows, None, lambda req_ids: None
    cache.movers = [[SimpleNamespace(move=lambda *slots: moved.append(slots))]]
    group = SimpleNamespace(layer_names=["layer"], kernel_block_size=16)
    tables, logits = [there(3, 7, dtype=torch.int32)], there(14, VOCAB, dtype=torch.float32)

    def run(*, greedy: bool, invalid: Tensor | None = None) -> tuple[Any, Any, Any]:
        batch = a_batch()
        metadata = SimpleNamespace(block_table=there(3, 7, dtype=torch.int32), max_seq_len=LONGEST)
        slots = there(1, batch.num_tokens)
        trees.lay(batch)
        cache.attach({"layer": metadata}, batch, [[group]], tables, slots, step=trees.step, for_capture=False)
        sampler: Any = Sampler(greedy=greedy)
        output = sampling.TreeSampler(sampler, trees, StageClock(torch.device("cpu")))(logits, batch, None, invalid)
        cache.commit(trees.step)
        counts.count(batch, trees.step)
        return metadata.trees, output, moved[-1]

    return run


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("greedy", [True, False])
def test_a_step(whole_step: Any, monkeypatch: pytest.MonkeyPatch, greedy: bool, at_once: bool) -> None:
    """Trees are laid, attended to, walked, committed and counted."""
    from vllm_medusa.host.v2 import sampling

    monkeypatch.setattr(sampling.TreeSampler, "_at_once", lambda *_: at_once)
    attended, output, (sources, targets) = whole_step(greedy=greedy, invalid=there(14, dtype=torch.bool))
    assert (attended.num_rows, attended.others, attended.inputs["max_rows"]) == (13, "the host's", 9)
    assert {part.device for part in attended.inputs.values() if isinstance(part, Tensor)} == {ELSEWHERE}
    assert output.sampled_token_ids.shape == (3, NODES + 1)
    assert sources.device == targets.device == ELSEWHERE and sources.shape == (3, NODES)


def test_launches_are_as_many_as_the_prediction_takes(
    whole_step: Any, trees: Any, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a step whose requests all take the likeliest token, without texts: docs/gpu.md tells what they cost."""
    monkeypatch.syspath_prepend(repository / "benchmarks")
    from gpu_step import SMALL_KERNELS

    proposer, hidden = a_proposer(root_conditioned=True), there(3, HIDDEN, dtype=torch.float32)
    trees.max_depth = 3
    for launches in (Launches(), Launches()):  # the first one also makes what is kept
        with torch.inference_mode(), launches:
            whole_step(greedy=True)
            trees.put(there(3), proposer.propose_tensors(hidden, there(3), None))
    assert launches.count == pytest.approx(SMALL_KERNELS, rel=0.1)


def test_a_slot_is_cleared(trees: Any) -> None:
    trees.clear(2)
