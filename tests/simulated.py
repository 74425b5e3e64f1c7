"""Serving in a simulation: a machine whose costs are known, requests whose drafts are as good as a test says.

The policy that is tested is the one that serves: cost, trust and budget, called as `host/v1/drafting.py` calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from vllm_medusa.budget import NodeBudget
from vllm_medusa.cost import StepCost
from vllm_medusa.trust import Trusts, at_temperature

SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # measured at start-up
# Seconds of a step by its tokens: the README's machine, and one with AVX2 only in bfloat16, where rows are not free.
README = ((1, 0.0241), (8, 0.0318), (16, 0.0398), (48, 0.0496), (128, 0.0597), (512, 0.150))
ROW_BY_ROW = ((1, 0.031), (2, 0.047), (4, 0.084), (8, 0.145), (16, 0.291), (128, 2.1))


def curve(points: Sequence[tuple[int, float]]) -> Callable[[float], float]:
    """Seconds by tokens, interpolated."""
    sizes, times = zip(*points, strict=True)
    return lambda tokens: float(np.interp(tokens, sizes, times))


@dataclass
class Request:
    """One request.

    Attributes:
        certain: of the heads, 0 to 1: how likely they think what they draft.
        kept: how much of that comes true.
        temperature: at which tokens are drawn; `kept` holds what that does.
        context: tokens in the cache.
    """

    certain: float = 0.75
    kept: float = 1.0
    temperature: float = 0.0
    context: int = 0


@dataclass
class Step:
    """What came of one step."""

    nodes: list[int]
    emitted: list[int]
    seconds: float
    asked: bool


@dataclass
class Serving:
    """Requests served step by step; nothing here knows of phases."""

    points: Sequence[tuple[int, float]] = README
    requests: list[Request] = field(default_factory=list)
    seed: int = 0
    heads_seconds: float = 0.0013
    by_key: float = 0.0
    by_node_key: float = 0.0
    slow: Callable[[np.random.Generator, int], float] = lambda rng, tokens: 1.0
    width: int = 32
    believe: Literal["each", "all", "truth"] = "each"  # "all": one estimate for all requests; "truth": told, not learnt

    def __post_init__(self) -> None:
        """Measure at start-up."""
        self.rng = np.random.default_rng(self.seed)
        self.true = curve(self.points)
        self.cost = StepCost.from_points([(size, self.true(size)) for size in SIZES])
        self.budget = NodeBudget(self.cost)
        for size in (1, 2, 4, 8, 16, 32):
            self.budget.heads_cost.seed(size, self.heads_seconds)
        self.trusts = Trusts()

    def promises(self, request: Request) -> np.ndarray:
        """float32 [width], reach of a request's nodes."""
        first = self.rng.beta(8.0 * request.certain, 8.0 * (1.0 - request.certain))
        return np.asarray(first ** np.arange(1, self.width + 1) ** 0.9, dtype=np.float32)

    def step(self) -> Step:
        """One step of all requests, and what the policy learns from it."""
        batch, names = len(self.requests), [str(place) for place in range(len(self.requests))]
        temperatures = [request.temperature for request in self.requests]
        context = np.array([request.context for request in self.requests])
        for name, temperature in zip(names, temperatures, strict=True):
            self.trusts.add(name, temperature)
        reach = np.stack([self.promises(request) for request in self.requests])
        kept = np.array([request.kept for request in self.requests], dtype=np.float32)
        true = reach * kept[:, None]
        if any(temperatures) and self.believe == "each":
            reach = at_temperature(reach, temperatures)
        asked = self.budget.asks_heads(batch)
        trust = self.trusts.shares(names, self.cost.clock)
        if self.believe != "each":
            trust = kept if self.believe == "truth" else np.full(batch, self.trusts.every.share, dtype=np.float32)
        sizes = np.zeros(batch, dtype=np.int64)
        if asked:
            nothing = np.zeros((batch, 0), dtype=np.float32)
            full = np.full(batch, self.width)
            known = context if context.any() else None
            sizes = self.budget.share(reach, full, without_heads=nothing, trust=trust, context=known)
        drafted = np.arange(self.width) < sizes[:, None]
        accepted = ((true > self.rng.random((batch, 1))) & drafted).sum(axis=1)
        tokens, keys, node_keys = batch + int(sizes.sum()), int(context.sum()), int((context * sizes).sum())
        seconds = self.true(tokens) + self.by_key * keys + self.by_node_key * node_keys
        seconds *= self.slow(self.rng, tokens) * self.rng.lognormal(0.0, 0.03)
        self.budget.tries.earn(self.cost.observe(tokens, seconds, keys, node_keys))
        promised = np.where(drafted, reach, 0.0).sum(axis=1)
        self.trusts.learn(names, promised, accepted, self.cost.clock)
        return Step(sizes.tolist(), (1 + accepted).tolist(), seconds + asked * self.heads_seconds, asked)

    def steps(self, count: int) -> list[Step]:
        """So many steps."""
        return [self.step() for _ in range(count)]


def nodes(steps: Sequence[Step]) -> float:
    """Nodes per step."""
    return float(np.mean([sum(step.nodes) for step in steps]))


def rate(steps: Sequence[Step]) -> float:
    """Tokens per second."""
    return sum(sum(step.emitted) for step in steps) / sum(step.seconds for step in steps)
