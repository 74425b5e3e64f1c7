"""The fuzzer can fail: each of these faults, put into the product or the host, is found within a few schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hostile import World, drawn
from outcomes import Violation
from schedules import BLOCK, Ask, Schedule, shrink

from vllm_medusa import proposer
from vllm_medusa.host import scheduler, tree_cache, trees
from vllm_medusa.host.metrics import figures
from vllm_medusa.host.v1 import cpu_runner, proposals, runner
from vllm_medusa.tree import lookup

pytestmark = pytest.mark.slow  # engines start
Runner = cpu_runner.MedusaCPUModelRunner
Patch = pytest.MonkeyPatch
SCHEDULES = 30  # at most; most faults show in the first or second


def change_step(patch: Patch, change: Callable[[trees.StepTrees, trees.DraftBook], trees.StepTrees]) -> None:
    """Lay trees wrongly."""

    def lay_trees(requests: Any, scheduled: Any, book: Any, *args: Any) -> trees.StepTrees:
        return change(trees.lay_trees(requests, scheduled, book, *args), book)

    patch.setattr(runner, "lay_trees", lay_trees)


def no_commit(patch: Patch) -> None:
    patch.setattr(Runner, "_commit", lambda *_: None)


def no_commit_of_the_deepest(patch: Patch) -> None:
    def find_moves(step: Any, paths: Any) -> Any:
        shorter = paths.copy()
        for row, length in enumerate((paths >= 0).sum(axis=1)):
            if length > 2:
                shorter[row, length - 1] = -1
        return original(step, shorter)

    original = runner.find_moves
    patch.setattr(runner, "find_moves", find_moves)


def deep_moves_first(patch: Patch) -> None:
    """A target is overwritten before it has moved as a source."""
    original = runner.find_moves
    patch.setattr(runner, "find_moves", lambda *args: tuple(part[::-1].copy() for part in original(*args)))


def position_is_slot(patch: Patch) -> None:
    def prepare(self: Any, *args: Any) -> Any:
        prepared = original(self, *args)
        if self.trees.is_tree.any():
            rows = self.trees.token_rows(self.trees.is_tree)
            place = np.broadcast_to(np.arange(self.trees.parents.shape[1] + 1), self.trees.on_row.shape)
            flat = self.trees.context[:, None] + place
            self.positions[torch.from_numpy(rows)] = torch.from_numpy(
                flat[self.trees.on_row & self.trees.is_tree[:, None]]
            )
        return prepared

    original = Runner._prepare_inputs
    patch.setattr(Runner, "_prepare_inputs", prepare)


def window_by_slot(patch: Patch) -> None:
    """Sliding windows measured from the slot of a node instead of its depth."""

    def attach(metadata: Any, checked: Any, *args: Any) -> None:
        flat = torch.cat([torch.arange(count) for count in checked.counts.tolist()])
        original(metadata, replace(checked, depths=flat), *args)

    original = tree_cache.attach_trees
    patch.setattr(tree_cache, "attach_trees", attach)


def one_mask_for_all(patch: Patch) -> None:
    def change(step: trees.StepTrees, _: Any) -> trees.StepTrees:
        first = next((row for row in range(len(step.requests)) if step.is_tree[row]), None)
        if first is not None:
            step.__dict__["ancestors"] = np.broadcast_to(step.ancestors[first], step.ancestors.shape).copy()
        return step

    change_step(patch, change)


def tokens_counted_as_logits(patch: Patch) -> None:
    """Row offsets that are right only while nobody computes a prompt."""
    change_step(patch, lambda step, _: replace(step, first_token=step.first_logit))


def logits_counted_as_tokens(patch: Patch) -> None:
    """The reverse, in mixed steps, kept within the rows that there are."""

    def change(step: trees.StepTrees, _: Any) -> trees.StepTrees:
        return replace(step, first_logit=np.minimum(step.first_token, int(step.sizes.sum()) + len(step.sizes) - 1))

    change_step(patch, change)


def length_counts_unscheduled_drafts(patch: Patch) -> None:
    def change(step: trees.StepTrees, _: Any) -> trees.StepTrees:
        cut = [0 if draft is None else draft.size - size for draft, size in zip(step.drafts, step.sizes, strict=True)]
        return replace(step, context=step.context + np.minimum(cut, 1))

    change_step(patch, change)


def trees_are_kept(patch: Patch) -> None:
    patch.setattr(trees.DraftBook, "forget", lambda *_: None)


def trees_survive_preemption(patch: Patch) -> None:
    def execute(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        kept = {name: self.book._drafts.get(name) for name in scheduler_output.preempted_req_ids or ()}
        result = original(self, scheduler_output, *args, **kwargs)
        for name, entry in kept.items():
            if entry is not None:
                self.book._drafts.setdefault(name, entry)
        return result

    original = Runner.execute_model
    patch.setattr(Runner, "execute_model", execute)


def hidden_row_of_the_root(patch: Patch) -> None:
    patch.setattr(runner, "_last_rows", lambda walk: np.zeros(len(walk.lengths), dtype=np.int64))


def half_prompts_walk(patch: Patch) -> None:
    """Requests whose prompt is not computed to its end draw from their generators."""
    original = runner.StepRows
    patch.setattr(runner, "StepRows", lambda step, said, late, ends: original(step, said, np.zeros_like(late), ends))


def any_child_will_do(patch: Patch) -> None:
    """The walk follows an only child whatever its token is; the emitted tokens stay the target's."""

    def children(self: trees.StepTrees, rows: Any, sampled: Any) -> Any:
        right = original(self, rows, sampled)
        if not self.num_nodes:
            return right
        below = (self.parents == rows[:, None]) & (np.arange(self.parents.shape[1]) < self.sizes[:, None])
        only = (below.sum(axis=1) == 1) & (rows > 0)
        return np.where((right < 0) & only, below.argmax(axis=1) + 1, right)

    original = trees.StepTrees.children
    patch.setattr(trees.StepTrees, "children", children)


def aborted_requests_keep_their_blocks(patch: Patch) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import RequestStatus

    original = KVCacheManager.free

    def free(self: Any, request: Any) -> None:
        if request.status != RequestStatus.FINISHED_ABORTED:
            original(self, request)

    patch.setattr(KVCacheManager, "free", free)


def it_breaks_on_long_paths(patch: Patch) -> None:
    def commit(self: Any, step: Any, paths: Any) -> None:
        if paths.shape[1] > 4:
            raise RuntimeError("a path of five rows")
        original(self, step, paths)

    original = Runner._commit
    patch.setattr(Runner, "_commit", commit)


def preempted_requests_wait_forever(patch: Patch) -> None:
    from vllm.v1.core.sched.interface import PauseState

    from vllm_medusa.host.scheduler import MedusaScheduler

    original = MedusaScheduler.schedule

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        preempted = any(request.num_preemptions for request in self.waiting)
        self._pause_state = PauseState.PAUSED_NEW if preempted else PauseState.UNPAUSED
        try:
            return original(self, *args, **kwargs)
        finally:
            self._pause_state = PauseState.UNPAUSED

    patch.setattr(MedusaScheduler, "schedule", schedule)


def heads_are_lost_in_sleep(patch: Patch) -> None:
    patch.setattr(proposer.MedusaProposer, "load_again", lambda self: None)


def heads_keep_their_copy(patch: Patch) -> None:
    """The rows of the reduced vocabulary stay what they were when the engine fell asleep."""
    patch.setattr(proposer.MedusaProposer, "weights_changed", lambda self: None)


def texts_are_kept(patch: Patch) -> None:
    patch.setattr(lookup.Lookups, "forget", lambda *_: None)


def any_candidate_is_taken(patch: Patch) -> None:
    """Drawn candidates are not judged: the first one is emitted."""
    patch.setattr(proposals, "recursive_rejection", lambda target, drawn_from, children, uniforms: children[:, 0])


def a_report_breaks(patch: Patch) -> None:
    def mean(self: Any) -> float:
        raise KeyError("walk")

    patch.setattr(figures.Counts, "mean_accepted_length", property(mean))


def even_steps_forget_what_they_cut(patch: Patch) -> None:
    def even_out(plan: Any) -> None:
        tokens = dict(plan.num_scheduled_tokens)
        original(plan)
        plan.num_scheduled_tokens.update(tokens)
        plan.total_num_scheduled_tokens = sum(tokens.values())

    original = scheduler.even_out
    patch.setattr(scheduler, "even_out", even_out)


FAULTS: dict[Callable[[Patch], None], tuple[str, set[str]]] = {
    no_commit: ("", {"tokens", "cache"}),
    no_commit_of_the_deepest: ("", {"tokens", "cache"}),
    deep_moves_first: ("", {"tokens", "cache"}),
    position_is_slot: ("", {"tokens", "cache"}),
    window_by_slot: ("gemma", {"tokens", "cache"}),
    one_mask_for_all: ("", {"tokens", "cache"}),
    tokens_counted_as_logits: ("", {"tokens", "cache", "crash"}),
    logits_counted_as_tokens: ("", {"tokens", "hidden row", "crash"}),
    length_counts_unscheduled_drafts: ("", {"tokens", "cache"}),
    trees_are_kept: ("", {"stale tree"}),
    trees_survive_preemption: ("", {"stale tree"}),
    hidden_row_of_the_root: ("", {"hidden row"}),
    half_prompts_walk: ("", {"tokens"}),
    any_child_will_do: ("", {"tokens", "cache"}),
    aborted_requests_keep_their_blocks: ("", {"leak", "hang", "crash"}),
    it_breaks_on_long_paths: ("", {"crash"}),
    preempted_requests_wait_forever: ("", {"hang"}),
    heads_are_lost_in_sleep: ("", {"heads", "crash"}),
    heads_keep_their_copy: ("", {"heads", "crash"}),
    texts_are_kept: ("", {"stale text"}),
    any_candidate_is_taken: ("", {"tokens", "crash"}),
    a_report_breaks: ("", {"crash"}),
    even_steps_forget_what_they_cut: ("", {"tokens", "cache", "length", "crash"}),
}


def as_drawn(schedule: Schedule) -> Schedule:
    return schedule


def that_preempt(schedule: Schedule) -> Schedule:
    """Too few blocks, and drafts that take them; nobody else preempts, whose requests would resume at once."""
    return replace(schedule, crowded=True, spare_blocks=0, flushes=[], sleeps=[])


def that_draw(schedule: Schedule) -> Schedule:
    """Candidates drawn by the heads alone, and answers in which most tokens are ruled out."""
    few = {"temperature": 1.0, "top_k": 4, "ignore_eos": True}
    asks = [replace(ask, sampling={**few, "seed": ask.number}) for ask in schedule.asks]
    return replace(schedule, asks=asks, source="heads", drawn=True, lookup=False)


# What shows in few schedules as they are drawn; these are bent to where it can show.
BENT: dict[Callable[[Patch], None], Callable[[Schedule], Schedule]] = {
    trees_survive_preemption: that_preempt,
    any_candidate_is_taken: that_draw,
}


def first_violation(
    worlds: dict[str, World], model: str, bend: Callable[[Schedule], Schedule] = as_drawn
) -> tuple[Schedule, Violation] | None:
    for schedule in map(bend, drawn(worlds, range(SCHEDULES))):
        if model and schedule.model != model:
            continue
        violation = worlds[schedule.model].violates(schedule)
        if violation is not None:
            return schedule, violation
    return None


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_it_is_found(worlds: dict[str, World], monkeypatch: Patch, fault: Callable[[Patch], None]) -> None:
    model, kinds = FAULTS[fault]
    fault(monkeypatch)
    found = first_violation(worlds, model, BENT.get(fault, as_drawn))
    assert found is not None, f"{SCHEDULES} schedules found nothing"
    schedule, violation = found
    print(f"seed {schedule.seed}: {violation}")
    assert violation.kind in kinds, violation
    monkeypatch.undo()
    assert worlds[schedule.model].violates(schedule) is None, "the same schedule without the fault"


@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_a_wrong_value_in_the_prefix_cache_is_found(worlds: dict[str, World], model: str) -> None:
    """One number of one cached block, in any layer, keys or values."""
    world = worlds[model]
    prompt = list(range(2, 2 + 3 * BLOCK))
    schedule = Schedule(seed=1, model=model, asks=[Ask(prompt, 4)])
    assert world.violates(schedule) is None
    blocks = [block for block in world.pool.blocks if block.block_hash is not None]
    assert len(blocks) >= 2 + world.groups  # of the group with a window only what it may still see
    groups = world.trees.runner.kv_cache_config.kv_cache_groups
    for name, layer in world.trees.runner.compilation_config.static_forward_context.items():
        group = next(i for i, group in enumerate(groups) if name in group.layer_names)
        for half in layer.impl.halves(layer.kv_cache):
            block = next(block for block in blocks if world.cached.group_of(block) == group)
            numbers = half[block.block_id]
            before = numbers[0, 5, 7].item()
            numbers[0, 5, 7] += 0.01 * numbers.abs().max()
            world.cached.known.clear()
            assert "are off by" in world.cached.check(None)[1], name
            numbers[0, 5, 7] = before
            world.cached.known.clear()
            assert world.cached.check(None) == (len(blocks), "")
    world.cached.forget()


def test_a_failure_shrinks_to_a_file_that_fails_alike(worlds: dict[str, World], monkeypatch: Patch, tmp_path) -> None:
    no_commit(monkeypatch)
    found = first_violation(worlds, "")
    assert found is not None
    schedule, violation = found
    world = worlds[schedule.model]

    def fails_alike(candidate: Schedule) -> bool:
        again = world.violates(candidate)
        return again is not None and again.kind == violation.kind

    small = shrink(schedule, fails_alike, tries=80)
    assert len(small.asks) == 1 and len(small) < len(schedule) / 2
    (tmp_path / "small.json").write_text(small.to_json())
    again = Schedule.load(tmp_path / "small.json")
    assert again == small
    assert fails_alike(again) and fails_alike(again), "every time"
    monkeypatch.undo()
    assert world.violates(again) is None, "and only with the fault"
