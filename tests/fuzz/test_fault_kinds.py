"""The kinds of faults that other engines' users have reported, each by a named test.

| kind of fault | where it is tested (`names` are faults of test_fuzzer_finds_faults.py) |
| --- | --- |
| a path moved over itself, over blocks far apart | host/test_commit.py (every path), attention/test_mover.py |
| at every alignment | host/test_tree_parity.py::test_every_prompt_length_around_blocks |
| over several KV cache groups | here, and every schedule on "gemma" |
| position confused with slot | here; `position_is_slot`, in windows `window_by_slot` |
| one mask for a whole batch | host/test_tree_parity.py::test_every_request_has_its_own_topology; `one_mask_for_all` |
| stale drafts after preemption | here; `trees_survive_preemption` |
| drafts of a request that lost its budget for a step | here |
| partial prefills in the proposer | here; host/test_sampling_parity.py::test_seeds_survive_partial_prefill |
| hidden row from the wrong place | here (acceptance); `hidden_row_of_the_root`; host/test_smollm2_parity.py |
| a step that commits nothing | here; host/test_commit.py::test_chains_move_nothing |
| NaN in heads | here; tree/test_growth.py::test_dynamic_survives_nan; heads/test_checkpoint.py (in a file) |
| NaN in logits | here |
| wrong row offsets in mixed steps | host/test_trees.py::test_a_mixed_batch; `tokens_counted_as_logits` |
| cached length derived from unscheduled drafts | here, and after each step of each schedule |
| acceptance after a full prefix hit | here |
| finished in the middle of a path | host/test_sampling_parity.py::test_every_max_tokens, host/test_request_edges.py |
| sizes 31, 32, 33, 63, 64, 65, 127, 128 | host/test_tree_parity.py::test_random_trees_of_each_size |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hostile import World
from schedules import BLOCK, EOS, Ask, Schedule

pytestmark = pytest.mark.slow  # engines start
Watch = Callable[[str, str, Callable[[Any], Any]], list[Any]]
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([77, seed]).integers(2, EOS, length).tolist()


def asks(*lengths: int, tokens: int = 24, **fields: Any) -> list[Ask]:
    return [
        Ask(prompt(length, number), tokens, sampling=GREEDY, number=number, **fields)
        for number, length in enumerate(lengths)
    ]


def schedule(model: str, requests: list[Ask], **fields: Any) -> Schedule:
    usual: dict[str, Any] = {"seed": 3, "misses": 0.0, "nodes": 16, "depth": 8, "padding": False}
    return Schedule(model=model, asks=requests, **{**usual, **fields})


@pytest.fixture
def seen(worlds: dict[str, World], monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Note what a method of a model's runner leaves behind, each time it has run."""

    def watch(model: str, method: str, note: Callable[[Any], Any]) -> list[Any]:
        runner, notes = worlds[model].trees.runner, []
        original = getattr(runner, method)

        def noting(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            notes.append(note(runner))
            return result

        monkeypatch.setattr(runner, method, noting)
        return notes

    return watch


def accepted(world: World, plan: Schedule) -> float:
    """Run a schedule that must be right; tokens per request and step."""
    world.trees.runner.medusa_report(reset=True)
    world.run(plan)
    return float(world.trees.runner.medusa_report()["mean_accepted_length"])


@pytest.mark.parametrize("rewrites", [False, True])
def test_a_path_is_committed_in_every_kv_cache_group(worlds, rewrites):
    world = worlds["gemma"]
    assert world.groups == 2
    plan = schedule("gemma", asks(5, 31, 33, 64, 90), rewrites=rewrites)
    before = world.totals.blocks
    assert accepted(world, plan) > 2.5
    assert world.totals.blocks >= before + 8, "both groups' cached blocks equal a recomputation"


@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_positions_are_depths_and_slots_are_flat(worlds, seen, model):
    def note(runner: Any) -> Any:
        count = int(runner.query_start_loc.np[runner.input_batch.num_reqs])
        slots = [
            table.slot_mapping.gpu[:count].clone().numpy() for table in runner.input_batch.block_table.block_tables
        ]
        tables = [table.block_table.np.copy() for table in runner.input_batch.block_table.block_tables]
        return runner.trees, runner.positions[:count].clone().numpy(), slots, tables

    steps = seen(model, "_prepare_inputs", note)
    worlds[model].run(schedule(model, asks(1, 20, 40, 63), budget=60))
    checked = 0
    for trees, positions, slots, tables in steps:
        for row in np.flatnonzero(trees.is_tree):
            first, size, context = trees.first_token[row], trees.sizes[row], trees.context[row]
            here = slice(first, first + size + 1)
            assert positions[here].tolist() == (context + trees.depths[row, : size + 1]).tolist()
            flat = context + np.arange(size + 1)
            for slot, table in zip(slots, tables, strict=True):
                assert slot[here].tolist() == (table[row, flat // BLOCK] * BLOCK + flat % BLOCK).tolist()
            checked += bool((positions[here] != flat).any())
    assert checked > 10


def test_a_preempted_request_loses_its_tree(worlds, seen):
    world = worlds["llama"]
    dropped: list[bool] = []
    original = world.scheduler._preempt_request

    def preempt(request: Any, *args: Any, **kwargs: Any) -> None:
        had = request.request_id in world.trees.runner.book._drafts
        original(request, *args, **kwargs)
        dropped.append(had and not request.spec_token_ids)

    world.scheduler._preempt_request = preempt
    try:
        world.run(schedule("llama", asks(30, 31, 32, 33, tokens=32), spare_blocks=0, max_len=80))
    finally:
        del world.scheduler._preempt_request
    assert any(dropped), "the world itself checks the book after each step"


def test_drafts_wait_while_their_request_has_no_budget(worlds):
    """Of six trees that nobody cuts a step has room for two: the others keep theirs, and accept from them later."""
    world = worlds["llama"]
    skipped, cut = world.totals.skipped_drafts, world.totals.cut_drafts
    plan = schedule("llama", asks(*[8] * 6), budget=26, nodes=24, misses=0.3, crowded=True)
    assert accepted(world, plan) > 2.0
    assert world.totals.skipped_drafts >= skipped + 8 and world.totals.cut_drafts >= cut + 8


def test_nothing_is_drafted_from_half_a_prompt(worlds, monkeypatch):
    world = worlds["llama"]
    pieces, drafted = world.totals.prompt_pieces, []
    original = World.check_hidden

    def check(self: World, names: Any, hidden: Any, roots: Any) -> None:
        drafted.extend(names)
        for name in names:
            request = world.trees.runner.requests[name]
            assert request.num_computed_tokens + 1 >= request.num_prompt_tokens or request.output_token_ids
            assert request.output_token_ids, "a draft follows an emitted token"
        original(self, names, hidden, roots)

    monkeypatch.setattr(World, "check_hidden", check)
    world.run(schedule("llama", asks(100, 7, 90, 64), budget=23))
    assert world.totals.prompt_pieces > pieces + 6 and drafted


@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_the_heads_see_the_row_that_produced_the_root(worlds, monkeypatch, model):
    """Truth is planted only where the hidden row leads to the root again: from wrong rows nothing would be accepted."""
    from script import Script

    world = worlds[model]
    original = Script.__call__
    right: list[bool] = []

    def draft(self: Script, rows: Any, hidden: torch.Tensor, roots: torch.Tensor) -> Any:
        again = world.trees.runner.model.compute_logits(hidden).argmax(dim=-1)
        right.extend((again == roots).tolist())
        self.misses = 0.0 if bool((again == roots).all()) else 1.0
        return original(self, rows, hidden, roots)

    monkeypatch.setattr(Script, "__call__", draft)
    assert accepted(world, schedule(model, asks(70, 5, 33, 12), budget=40)) > 2.5
    assert len(right) > 20 and all(right)


def test_steps_that_accept_nothing(worlds):
    assert accepted(worlds["llama"], schedule("llama", asks(3, 32, 50), misses=1.0)) < 1.1


def test_nan_in_the_heads(worlds, monkeypatch):
    """Heads that overflow: worthless drafts, right answers."""
    world = worlds["llama"]
    runner, requests = world.trees.runner, asks(9, 40)
    weights = [parameter for parameter in runner.drafter.heads.parameters()]
    before = [weight.detach().clone() for weight in weights]
    truth = [world.answer(ask) for ask in requests]
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=24)
    try:
        for weight in weights:
            weight.data.fill_(float("nan"))
        for value in (float("nan"), float("inf"), 1e38):
            weights[0].data.fill_(value)
            assert world.trees.tokens([ask.prompt for ask in requests], params) == truth
    finally:
        for weight, value in zip(weights, before, strict=True):
            weight.data.copy_(value)


def test_nan_in_the_targets_logits(worlds, monkeypatch):
    """A target that gives NaN after some tokens: the same answer as without trees, and the engine goes on."""
    world = worlds["llama"]
    requests = [Ask(prompt(6, 40 + n), 24, sampling={**GREEDY, "seed": 40 + n}, number=n) for n in range(6)]
    for engine in (world.plain, world.trees):
        original = engine.runner.model.compute_logits

        def broken(hidden: torch.Tensor, original: Any = original) -> torch.Tensor:
            logits = original(hidden)
            row = logits.argmax(dim=-1) % 9 == 0
            logits[row, 17:23] = float("nan")
            return logits

        monkeypatch.setattr(engine.runner.model, "compute_logits", broken)
    plan = schedule("llama", requests)
    monkeypatch.setattr(World, "check_hidden", lambda *_: None)
    world.run(plan)
    said = [token for ask in requests for token in world.answer(ask)]
    assert said.count(17) > 3, "the first NaN is the greedy choice, in plain decoding too"


def test_lengths_know_nothing_of_drafts_that_were_not_scheduled(worlds, seen):
    """Drafts are cut by the budget, by max_model_len and by a limit on pieces; context stays what was computed."""
    world = worlds["llama"]
    steps = seen(
        "llama", "_prepare_inputs", lambda runner: (runner.trees, runner.input_batch.num_tokens_no_spec.copy())
    )
    cut = world.totals.cut_drafts
    world.run(schedule("llama", asks(30, 40, 10), budget=21, piece=9, max_len=60, nodes=30))
    for trees, known in steps:
        for row, size in enumerate(trees.sizes):
            assert trees.context[row] == known[row] - 1 if size else trees.context[row] < known[row]
    assert world.totals.cut_drafts > cut + 10


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_acceptance_after_a_full_prefix_hit(worlds, model, padding):
    """All but the last token of a prompt comes from the cache; the next step accepts a path."""
    world = worlds[model]
    shared = prompt(3 * BLOCK + 1, 60)
    first = Ask(shared, 2, sampling=GREEDY, number=0)
    second = Ask(shared, 24, sampling=GREEDY, number=1, arrives=6)
    third = Ask(shared, 20, sampling=GREEDY, number=2, arrives=8)
    cached, padded = world.totals.cached_tokens, world.totals.padded_drafts
    assert accepted(world, schedule(model, [first, second, third], padding=padding)) > 2.5
    assert world.totals.cached_tokens == cached + 2 * 3 * BLOCK
    assert world.totals.padded_drafts == padded + (2 if padding else 0)


@pytest.mark.parametrize("limit", [{"budget": 12}, {"piece": 12}], ids=str)
def test_a_full_prefix_hit_beside_limits_smaller_than_a_tree(worlds, limit):
    """The host would pad such a request with as many drafts as a tree may have, and wait for ever for a step with so
    much room, or end on an assertion of its own. Our scheduler does not pad."""
    world = worlds["llama"]
    shared = prompt(2 * BLOCK + 1, 70)
    requests = [
        Ask(shared, 2, sampling=GREEDY, number=0),
        Ask(shared, 20, sampling=GREEDY, number=1, arrives=9),
        Ask(prompt(3, 71), 20, sampling=GREEDY, number=2, arrives=9),
    ]
    world.run(schedule("llama", requests, nodes=24, **limit))


def test_drafts_of_the_heads_themselves_leave_nothing_behind(worlds):
    world = worlds["llama"]
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=12)
    world.trees.tokens([prompt(length, 90 + length) for length in (3, 40, 70)], params)
    world.engine.step()  # in which the worker hears that they ended
    runner = world.trees.runner
    assert not len(runner.book) and not runner.requests
    drafting = getattr(runner, "drafting", None)
    assert drafting is None or not len(drafting.lookups)
