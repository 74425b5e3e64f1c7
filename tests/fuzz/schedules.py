"""A schedule: what requests come when, and how hostile the host is to them. Plain values, so that it can be stored.

`draw` makes one from a seed; `smaller` lists simpler ones that may show the same fault.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

VOCAB = 160
EOS = VOCAB - 1
BLOCK = 32
MAX_LEN = 256  # of the engines; a schedule may set a lower limit
MAX_NODES = 72  # of the engines' trees: ancestor bits in two words
LONGEST_ANSWER = 32
# Ways to choose tokens whose answer is determined, and does not depend on how the host schedules.
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.0, "presence_penalty": 0.8, "frequency_penalty": -0.4},
    {"temperature": 0.0, "logit_bias": {7: 6.0, 11: -9.0, EOS: 9.0}},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.9, "top_k": 20},
    {"temperature": 1.3, "min_p": 0.05, "repetition_penalty": 1.1},
    {"temperature": 0.8, "min_tokens": 5, "stop_token_ids": list(range(20, 60))},
    {"temperature": 0.0, "allowed_token_ids": [3, 5, 8]},  # soon repeats itself, as prompt lookup likes it
]
GRAMMARS: list[dict[str, Any]] = [
    {"regex": "(red|green|blue)( and (red|green|blue)){2,9}"},
    {"regex": "[0-9]{3}(, [0-9]{3})+[.]"},
    {"choice": ["red", "red and blue and green", "red and blue and red"]},
]
Answer = Callable[[str, "Ask"], list[int]]


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        prompt: token ids.
        max_tokens: as in `SamplingParams`.
        arrives: step before which it is added.
        aborted: this many steps later it is aborted, if it still runs; None: never.
        priority: lower ones first, where the schedule has priorities.
        sampling: further fields of `SamplingParams`.
        number: names the request, also in a schedule from which others were taken out.
    """

    prompt: list[int]
    max_tokens: int
    arrives: int = 0
    aborted: int | None = None
    priority: int = 0
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    number: int = 0


@dataclass(frozen=True)
class Talk:
    """A session that goes on (`StreamingInput`).

    Attributes:
        turns: prompt and `max_tokens` of each.
        arrives: step before which the first is sent.
        at_once: the others are sent with it, else each when the one before has ended.
    """

    turns: list[tuple[list[int], int]]
    arrives: int = 0
    at_once: bool = False


@dataclass(frozen=True)
class Schedule:
    """Requests, the host's limits while they run, and what is drafted for them.

    Attributes:
        seed: of the drafts.
        model: which engines.
        asks: the requests.
        seats: most requests that run at once (the host's `max_num_seqs`).
        budget: most tokens in a step.
        piece: most prompt tokens of a request in a step, 0 for no such limit.
        max_len: longest prompt and answer together.
        spare_blocks: KV blocks beyond what the longest possible request needs.
        by_priority: the host's scheduling policy.
        padding: new requests with one token left get drafts of -1, as the host has it.
        fresh: forget the prefix cache of earlier schedules.
        flushes: steps before which the prefix cache is dropped and all running requests are preempted.
        nodes, depth: largest trees.
        misses: how often nothing true is planted.
        rewrites: the commit writes accepted nodes again, as where there is no compiled kernel, instead of moving them.
        source: who drafts: "script" plants whole trees; "guesses" plants candidates of the heads, from which the
            product grows trees; "heads": nobody plants anything.
        adaptive: the product shares nodes by what steps cost, on a scripted clock.
        lookup: the requests' own texts are asked; not by a script.
        drawn: candidates of sampled requests are drawn from the heads; not by a script.
        statistics: figures are gathered and reported.
        crowded: drafts are not cut before a step is planned, so that requests wait with theirs, as vLLM has it.
        clock: milliseconds of a step, and of each token in it.
        reloads: steps before which weights are loaded again.
        sleeps: steps before which the engine sleeps and wakes up, and how deeply.
        talks: sessions beside the requests.
    """

    seed: int
    model: str
    asks: list[Ask]
    seats: int = 8
    budget: int = 256
    piece: int = 0
    max_len: int = MAX_LEN
    spare_blocks: int = 64
    by_priority: bool = False
    padding: bool = True
    fresh: bool = True
    flushes: list[int] = field(default_factory=list)
    nodes: int = 12
    depth: int = 6
    misses: float = 0.1
    rewrites: bool = False
    source: str = "script"
    adaptive: bool = False
    lookup: bool = False
    drawn: bool = False
    statistics: bool = False
    crowded: bool = False
    clock: tuple[float, float] = (10.0, 0.1)
    reloads: list[int] = field(default_factory=list)
    sleeps: list[tuple[int, int]] = field(default_factory=list)
    talks: list[Talk] = field(default_factory=list)

    def to_json(self) -> str:
        """As it is stored for a replay."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """The reverse."""
        values = json.loads(text)
        asks = [Ask(**ask) for ask in values.pop("asks")]
        for ask in asks:  # JSON knows only strings as keys
            if "logit_bias" in ask.sampling:
                ask.sampling["logit_bias"] = {int(k): v for k, v in ask.sampling["logit_bias"].items()}
        values["clock"] = tuple(values["clock"])
        values["sleeps"] = [tuple(sleep) for sleep in values["sleeps"]]
        for talk in values["talks"]:
            talk["turns"] = [tuple(turn) for turn in talk["turns"]]
        values["talks"] = [Talk(**talk) for talk in values["talks"]]
        return cls(asks=asks, **values)

    @classmethod
    def load(cls, path: Path | str) -> Schedule:
        """Read a stored one."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    def __len__(self) -> int:
        """A measure of how much there is to look at."""
        usual = type(self)(self.seed, self.model, [])
        names = ("piece", "max_len", "spare_blocks", "budget", "by_priority", "fresh", "misses", "rewrites")
        names += ("source", "adaptive", "lookup", "drawn", "statistics", "crowded", "clock")
        unusual = sum(getattr(self, name) != getattr(usual, name) for name in names) + self.padding + len(self.flushes)
        unusual += len(self.reloads) + len(self.sleeps) + sum(8 * len(talk.turns) for talk in self.talks)
        asked = sum(4 + len(ask.prompt) + ask.max_tokens + ask.arrives + (ask.aborted is not None) for ask in self.asks)
        return asked + self.nodes + self.depth + unusual + sum(len(ask.sampling) + ask.priority for ask in self.asks)


def draw(seed: int, models: Sequence[str], answer: Answer) -> Schedule:
    """A random schedule.

    Args:
        seed: decides everything.
        models: to choose from.
        answer: what plain decoding says, for requests that go on where an earlier one ended.
    """
    rng = np.random.default_rng([20, seed])
    nodes = int(rng.choice([1, 2, 3, 5, 8, 12, 16, 24, 31, 32, 33, 63, 64, 65, MAX_NODES]))
    padding = bool(rng.random() < 0.7)
    least = 1 + nodes if padding else 4  # less, and the host never finds room for a padded request
    max_len = int(rng.choice([MAX_LEN, int(rng.integers(24, 70)), int(rng.integers(60, 140))]))
    schedule = Schedule(
        seed=seed,
        model=str(rng.choice(list(models))),
        asks=[],
        seats=int(rng.choice([1, 2, 3, 4, 6, 8])),
        budget=int(rng.choice([least, least + int(rng.integers(0, 20)), 64 + least, 256])),
        piece=0 if padding else int(rng.choice([0, 0, int(rng.integers(3, 40))])),
        max_len=max_len,
        spare_blocks=int(rng.choice([0, 0, 1, 2, 4, 64])),
        by_priority=bool(rng.random() < 0.4),
        padding=padding,
        fresh=bool(rng.random() < 0.3),
        flushes=sorted(rng.integers(1, 40, int(rng.choice([0, 0, 0, 1, 2]))).tolist()),
        nodes=nodes,
        depth=int(rng.choice([2, 4, 8, 12])),
        misses=float(rng.choice([0.0, 0.1, 0.5])),
        rewrites=bool(rng.random() < 0.3),
    )
    # Half of the schedules speak of one of four things, so that one meets what another left in the cache.
    topics = np.random.default_rng([21, seed % 4 if rng.random() < 0.5 else seed])
    bases = [topics.integers(2, EOS, MAX_LEN).tolist() for _ in range(3)]
    asks: list[Ask] = []
    for number in range(int(rng.integers(2, 13))):
        asks.append(_ask(rng, number, bases, asks, max_len, answer, schedule.model))
    ways = np.random.default_rng([22, seed])
    schedule = replace(schedule, asks=asks, **_ways(ways, max_len))
    if schedule.drawn:  # from which only those that are sampled have anything
        sampled = {"temperature": 1.0, "ignore_eos": True}
        asks = [
            replace(ask, sampling={**sampled, "seed": int(ways.integers(0, 2**31))})
            if ask.sampling in ({"temperature": 0.0}, {"temperature": 0.0, "ignore_eos": True}) and ways.random() < 0.6
            else ask
            for ask in asks
        ]
    return replace(schedule, asks=asks)


def _ways(rng: np.random.Generator, max_len: int) -> dict[str, Any]:
    """How drafts come about, and what an operator does meanwhile."""
    source = str(rng.choice(["script", "script", "guesses", "guesses", "heads"]))
    drawn = source != "script" and bool(rng.random() < 0.3)

    def steps(often: float) -> list[int]:
        return sorted(rng.integers(1, 40, int(rng.integers(1, 3))).tolist()) if rng.random() < often else []

    return {
        "source": source,
        "adaptive": bool(rng.random() < 0.5),
        "lookup": source != "script" and not drawn and bool(rng.random() < 0.7),
        "drawn": drawn,
        "statistics": bool(rng.random() < 0.5),
        "crowded": bool(rng.random() < 0.4),
        "clock": (float(rng.choice([0.1, 10.0])), float(rng.choice([0.01, 0.1, 1.0]))),
        "reloads": steps(0.12),
        "sleeps": [(step, int(rng.choice([1, 2]))) for step in steps(0.15)],
        "talks": [_talk(rng, max_len) for _ in range(int(rng.choice([0, 0, 1, 3])))],
    }


def _talk(rng: np.random.Generator, max_len: int) -> Talk:
    turns: list[tuple[list[int], int]] = []
    for _ in range(int(rng.integers(1, 4))):
        turns.append((rng.integers(2, EOS, int(rng.integers(1, 9))).tolist(), int(rng.integers(1, 10))))
        if sum(len(prompt) + tokens for prompt, tokens in turns) > max_len - 8:
            turns.pop()
            break
    return Talk(turns or [([2], 1)], arrives=int(rng.integers(0, 30)), at_once=bool(rng.random() < 0.5))


def _ask(
    rng: np.random.Generator,
    number: int,
    bases: Sequence[list[int]],
    earlier: Sequence[Ask],
    max_len: int,
    answer: Answer,
    model: str,
) -> Ask:
    sampling = dict(SAMPLING[int(rng.integers(0, len(SAMPLING))) if rng.random() < 0.5 else 0])
    if model == "speaker" and rng.random() < 0.7:
        sampling = {"temperature": sampling["temperature"], "grammar": GRAMMARS[int(rng.integers(0, len(GRAMMARS)))]}
    if sampling["temperature"] > 0:
        sampling["seed"] = int(rng.integers(0, 2**31))
    if rng.random() < 0.6 and "grammar" not in sampling:
        sampling["ignore_eos"] = True
    kinds = ["one token", "short", "shared", "nearly shared", "whole blocks", "again", "again", "goes on"]
    kind = str(rng.choice(kinds))
    base = bases[int(rng.integers(0, len(bases)))]
    length = int(rng.integers(1, 120))
    arrives = int(rng.choice([0, int(rng.integers(0, 30))]))
    if kind == "one token":
        prompt = [int(rng.integers(2, EOS))]
        arrives = int(rng.integers(0, 30))
    elif kind == "short":
        prompt = rng.integers(2, EOS, int(rng.integers(1, 12))).tolist()
    elif kind == "whole blocks":  # a second one finds all but one or two of its tokens in the cache
        prompt = base[: BLOCK * int(rng.integers(1, 4)) + int(rng.choice([0, 1, 1, 2]))]
    elif kind == "again" and earlier:
        before = earlier[int(rng.integers(0, len(earlier)))]
        blocks = (len(before.prompt) - 1) // BLOCK
        prompt = before.prompt[: BLOCK * blocks + 1] if blocks and rng.random() < 0.7 else list(before.prompt)
        arrives = before.arrives + int(rng.integers(0, 20))
    elif kind == "goes on" and earlier:
        before = earlier[int(rng.integers(0, len(earlier)))]
        said = answer(model, before)
        prompt = [*before.prompt, *said[: int(rng.integers(1, len(said) + 1))]]
    else:
        prompt = base[:length]
        if kind == "nearly shared":
            prompt[int(rng.integers(0, length))] = int(rng.integers(2, EOS))
        prompt += rng.integers(2, EOS, int(rng.integers(0, 4))).tolist()
    prompt = prompt[: max_len - 1]
    if rng.random() < 0.1:  # ends where the host's limit does
        prompt = (prompt * MAX_LEN)[: max_len - int(rng.integers(1, 6))]
    return Ask(
        prompt=prompt,
        max_tokens=int(rng.integers(1, LONGEST_ANSWER + 1)),
        arrives=arrives,
        aborted=int(rng.integers(0, 16)) if rng.random() < 0.15 else None,
        priority=int(rng.integers(0, 3)),
        sampling=sampling,
        number=number,
    )


def smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Simpler schedules, the boldest cuts first."""
    asks = schedule.asks
    size = len(asks) // 2
    while size >= 1:
        for first in range(0, len(asks), size):
            rest = [*asks[:first], *asks[first + size :]]
            if rest or schedule.talks:
                yield replace(schedule, asks=rest)
        size //= 2
    usual: dict[str, Any] = {
        "flushes": [], "piece": 0, "by_priority": False, "fresh": True, "padding": False, "rewrites": False,
        "misses": 0.0, "max_len": MAX_LEN, "spare_blocks": 64, "budget": 256, "seats": 8,
        "talks": [], "sleeps": [], "reloads": [], "statistics": False, "adaptive": False, "lookup": False,
        "drawn": False, "crowded": False, "clock": (10.0, 0.1),
    }  # fmt: skip
    for talk in range(len(schedule.talks)):
        yield replace(schedule, talks=[*schedule.talks[:talk], *schedule.talks[talk + 1 :]])
    for name, value in usual.items():
        if getattr(schedule, name) != value:
            yield replace(schedule, **{name: value})
    for name in ("nodes", "depth"):
        value = getattr(schedule, name)
        for less in {max(1, value // 2), max(1, value - 1)} - {value}:
            yield replace(schedule, **{name: less})
    for place, ask in enumerate(asks):
        for simpler in _smaller_asks(ask):
            yield replace(schedule, asks=[*asks[:place], simpler, *asks[place + 1 :]])


def _smaller_asks(ask: Ask) -> Iterator[Ask]:
    plain = {"temperature": 0.0, "ignore_eos": True}
    if ask.aborted is not None:
        yield replace(ask, aborted=None)
    if ask.sampling != plain:
        yield replace(ask, sampling=plain)
    if ask.priority:
        yield replace(ask, priority=0)
    for arrives in {0, ask.arrives // 2} - {ask.arrives}:
        yield replace(ask, arrives=arrives)
    for tokens in {max(1, ask.max_tokens // 2), max(1, ask.max_tokens - 1)} - {ask.max_tokens}:
        yield replace(ask, max_tokens=tokens)
    for length in {1, max(1, len(ask.prompt) // 2), max(1, len(ask.prompt) - 1)} - {len(ask.prompt)}:
        yield replace(ask, prompt=ask.prompt[:length])


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool], tries: int = 200) -> Schedule:
    """The smallest schedule found that still fails, looking at `tries` of them at most."""
    while True:
        for candidate in smaller(schedule):
            if len(candidate) >= len(schedule) and len(candidate.asks) >= len(schedule.asks):
                continue
            if tries == 0:
                return schedule
            tries -= 1
            if fails(candidate):
                schedule = candidate
                break
        else:
            return schedule
