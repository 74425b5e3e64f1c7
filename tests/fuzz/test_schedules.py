"""Random schedules on a hostile host: the tokens of plain vLLM, no block lost, no tree left, a true prefix cache.

`make test-long` runs 4,000, CI the first 60. A schedule that fails is shrunk and stored; the message says how to run it
again.
"""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hostile import World, drawn
from outcomes import Totals, Violation
from schedules import Schedule, draw, shrink

pytestmark = pytest.mark.slow  # engines start
COUNT = 4000 if os.environ.get("MEDUSA_LONG") else 60
PART = 20
STORED = Path(__file__).parents[2] / "out" / "fuzz"


@pytest.mark.parametrize("first", range(0, COUNT, PART))
def test_random_schedules(worlds: dict[str, World], first: int) -> None:
    print(f"seeds {first} to {first + PART - 1}")
    for schedule in drawn(worlds, range(first, first + PART)):
        violation = worlds[schedule.model].violates(schedule)
        if violation is not None:
            pytest.fail(report(worlds[schedule.model], schedule, violation))


def report(world: World, schedule: Schedule, violation: Violation) -> str:
    """Shrink and store a failing schedule; what to tell."""

    def fails_alike(candidate: Schedule) -> bool:
        found = world.violates(candidate)
        return found is not None and found.kind == violation.kind

    small = shrink(schedule, fails_alike)
    STORED.mkdir(parents=True, exist_ok=True)
    path = STORED / f"seed-{schedule.seed}.json"
    path.write_text(small.to_json(), encoding="utf-8")
    return (
        f"seed {schedule.seed} on {schedule.model}: {violation}\n"
        f"Shrunk from {len(schedule.asks)} requests to {len(small.asks)}: {world.violates(small)}\n"
        f"Again: python tests/fuzz/replay.py {path}"
    )


def test_a_schedule_repeats(worlds: dict[str, World]) -> None:
    """The same steps of the same sizes, whatever the machine's clock says meanwhile."""
    plans = [draw(seed, ["llama"], lambda _, ask: worlds["llama"].answer(ask)) for seed in range(500, 512)]
    chosen = [plan for plan in plans if plan.adaptive and plan.source != "script"][:2]
    assert len(chosen) == 2
    world = worlds["llama"]
    for plan in chosen:
        steps: list[list[tuple[int, int]]] = []
        for _ in range(2):
            world.sizes.clear()
            world.run(replace(plan, fresh=True))
            steps.append(list(world.sizes))
        assert steps[0] == steps[1] and len({tokens for tokens, _ in steps[0]}) > 3


def test_the_host_was_hostile(worlds: dict[str, World]) -> None:
    """Comes last: what is promised above was really met."""
    for name, world in worlds.items():
        print(f"{name}: {world.totals}")
    totals = {
        name: sum(asdict(world.totals)[name] for world in worlds.values()) for name in Totals.__dataclass_fields__
    }
    if not totals["schedules"]:
        pytest.skip("no schedules ran")
    rare = min(totals["schedules"], 60) / 60
    for name, least in {
        "aborted": 20, "preemptions": 40, "flushes": 12, "cached_tokens": 1000, "padded_drafts": 10,
        "cut_drafts": 100, "skipped_drafts": 5, "prompt_pieces": 200, "blocks": 100, "hidden_rows": 500, "adaptive": 15,
        "unasked": 5, "text_nodes": 300, "drawn_drafts": 40, "reports": 10, "reloads": 3, "sleeps": 3,
    }.items():  # fmt: skip
        assert totals[name] >= least * rare, f"{name}: {totals[name]}"
    assert totals["ties"] <= 1 + totals["schedules"] // 500, "two tokens score the same once in a hundred thousand"
    assert totals["planted_tokens"] > 1.7 * totals["planted_steps"], "planted paths are accepted"
