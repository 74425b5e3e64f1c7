"""What a decode step of Llama-3-8B moves and computes, and from that what it takes on a GPU, without and with Medusa.

Nothing here is measured by us. A part of a step (matrix products, attention, logits, heads) takes as long as its bytes
at a share of the data sheet's bandwidth or its operations at a share of the data sheet's peak, whichever is longer. The
tree is grown by vllm_medusa/tree/growth.py and sized by vllm_medusa/budget.py from these times, as in serving.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_medusa.budget import NodeBudget
from vllm_medusa.cost import GRID, StepCost
from vllm_medusa.tree.growth import grow_static
from vllm_medusa.tree.topology import MAX_NODES

# Llama-3-8B, from its config.json; bfloat16 weights and KV cache.
LAYERS, HIDDEN, INNER, VOCAB = 32, 4096, 14336, 128256
HEADS, KV_HEADS, HEAD_SIZE, ITEM = 32, 8, 128, 2
LAYER_WEIGHTS = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV_HEADS * HEAD_SIZE + 3 * HIDDEN * INNER
KV_BYTES = 2 * LAYERS * KV_HEADS * HEAD_SIZE * ITEM  # of one token
# Elements that a token takes through one layer, in and out of each operation: norms with the residual, q k v,
# attention, o, gate and up, activation, down. Kernels that keep some of it on the chip move less.
LAYER_TRAFFIC = 14 * HIDDEN + 2 * (HEADS + 2 * KV_HEADS) * HEAD_SIZE + 6 * INNER
LOGIT_BYTES = ITEM + 4 + 4  # a logit is written once, copied to float32 once, read once

# Vicuna-7B's heads by candidates looked at (1 to 5): medusa_acc.csv of FasterDecoding/Medusa, row "7b", heads 0 to 3.
TOP = (
    (0.5604, 0.6717, 0.7271, 0.7599, 0.7799),
    (0.3164, 0.4236, 0.4851, 0.5282, 0.5625),
    (0.2010, 0.2879, 0.3475, 0.3834, 0.4169),
    (0.1474, 0.2250, 0.2737, 0.3109, 0.3397),
)
NUM_HEADS = len(TOP)


@dataclass(frozen=True)
class Gpu:
    """One GPU as its data sheet describes it: bytes/s, dense bfloat16 operations/s, bytes."""

    name: str
    bandwidth: float
    peak: float
    memory: float


GPUS = (
    Gpu("A100 80GB SXM", 2.039e12, 312e12, 80e9),
    Gpu("H100 SXM", 3.35e12, 989e12, 80e9),
    Gpu("H200 SXM", 4.8e12, 989e12, 141e9),
)
A100_40GB = Gpu("A100 40GB", 1.555e12, 312e12, 40e9)


# Of a step: trees laid, walked, committed, counted, grown. tests/host/test_one_device.py counts them.
SMALL_KERNELS = 270


@dataclass(frozen=True)
class Assumed:
    """What is neither counted nor on a data sheet.

    Attributes:
        bandwidth_share: of the data sheet's bandwidth that a whole step reaches, gaps between kernels included.
        peak_share: of the data sheet's operations per second that matrix products reach.
        overlap: memory and arithmetic at the same time; False adds their times.
        extra: seconds of a Medusa step's small kernels (growth, walk, commit).
        skill: factor on the accuracy of every candidate.
        unembeddings: matrices of logits that the heads read: 1 shares the target's, NUM_HEADS is one each.
        draft_vocab: tokens that the heads can guess.
        fixed_nodes: nodes drafted whatever they cost; None: as many as pay.
    """

    bandwidth_share: float = 0.70
    peak_share: float = 0.60
    overlap: bool = True
    extra: float = SMALL_KERNELS * 2.5e-6
    skill: float = 1.0
    unembeddings: int = 1
    draft_vocab: int = VOCAB
    fixed_nodes: int | None = None


BASE = Assumed()


@dataclass(frozen=True)
class Prediction:
    """One cell: seconds of a step without and with Medusa, nodes per request, tokens per request and step."""

    batch: int
    plain: float
    step: float
    nodes: float
    accepted: float

    @property
    def speedup(self) -> float:
        """Tokens per second over plain decoding's."""
        return self.accepted * self.plain / self.step


def accuracies(skill: float = 1.0) -> list[list[float]]:
    """[K][5], how often candidate r of head k is right: differences of the published cumulative figures."""
    return [[skill * float(gain) for gain in np.diff(row, prepend=0.0)] for row in TOP]


def part_seconds(gpu: Gpu, assumed: Assumed, moved: float, operations: float) -> float:
    """Time of one part of a step that moves so many bytes and does so many operations."""
    memory = moved / (gpu.bandwidth * assumed.bandwidth_share)
    compute = operations / (gpu.peak * assumed.peak_share)
    return max(memory, compute) if assumed.overlap else memory + compute


def step_seconds(gpu: Gpu, assumed: Assumed, batch: int, tokens: int, context: int) -> float:
    """A decode step of the target: `tokens` rows of `batch` requests that have `context` tokens each."""
    parts = step_parts(batch, tokens, context)
    return sum(part_seconds(gpu, assumed, moved, operations) for moved, operations in parts.values())


def step_parts(batch: int, tokens: int, context: int) -> dict[str, tuple[float, float]]:
    """(bytes, operations) of each part of such a step. A request's KV is read once for all of its rows."""
    seen = context + tokens / batch
    return {
        "matrix products": (
            LAYERS * ITEM * (LAYER_WEIGHTS + tokens * LAYER_TRAFFIC),
            2.0 * LAYERS * LAYER_WEIGHTS * tokens,
        ),
        "attention": ((batch * seen + tokens) * KV_BYTES, 4.0 * LAYERS * HEADS * HEAD_SIZE * seen * tokens),
        "logits": (VOCAB * HIDDEN * ITEM + tokens * VOCAB * LOGIT_BYTES, 2.0 * VOCAB * HIDDEN * tokens),
    }


def draft_parts(assumed: Assumed, batch: int) -> dict[str, tuple[float, float]]:
    """(bytes, operations) of what Medusa adds: heads of one residual block, their logits, the commit of their path."""
    rows, vocab = NUM_HEADS * batch, assumed.draft_vocab
    return {
        "heads' blocks": (ITEM * (NUM_HEADS * HIDDEN * HIDDEN + 4 * rows * HIDDEN), 2.0 * rows * HIDDEN * HIDDEN),
        "heads' logits": (
            assumed.unembeddings * vocab * HIDDEN * ITEM + rows * vocab * LOGIT_BYTES,
            2.0 * rows * vocab * HIDDEN,
        ),
        "commit": (2.0 * rows * KV_BYTES, 0.0),
    }


def draft_seconds(gpu: Gpu, assumed: Assumed, batch: int) -> float:
    """Time that a step with Medusa takes beside the target's."""
    parts = draft_parts(assumed, batch)
    return assumed.extra + sum(part_seconds(gpu, assumed, moved, work) for moved, work in parts.values())


def predict(gpu: Gpu, batch: int, context: int, assumed: Assumed = BASE) -> Prediction:
    """One cell of a table: the tree that the budget takes at these costs, and what it brings."""

    def seconds(tokens: int) -> float:
        return step_seconds(gpu, assumed, batch, tokens, context)

    plain, drafting = seconds(batch), draft_seconds(gpu, assumed, batch)
    table = accuracies(assumed.skill)
    tree = grow_static(table, assumed.fixed_nodes or MAX_NODES)
    reach = np.asarray(tree.reach(table), dtype=np.float32)
    taken = np.full(batch, tree.num_nodes)
    if assumed.fixed_nodes is None:
        budget = NodeBudget(StepCost.from_points([(n, seconds(n)) for n in GRID if n >= batch]))
        budget.heads_cost.observe(batch, drafting)
        every, sizes, nothing = np.tile(reach, (batch, 1)), taken, np.zeros((batch, 1), dtype=np.float32)
        for _ in range(8):  # as many looks as it takes to judge the heads
            taken = budget.share(every, sizes, without_heads=nothing)
        if not budget.asks_heads(batch):
            return Prediction(batch, plain, plain, 0.0, 1.0)
    brought = np.concatenate(([0.0], np.cumsum(reach)))[taken]
    step = drafting + seconds(batch + int(taken.sum()))
    return Prediction(batch, plain, step, float(taken.mean()), 1.0 + float(brought.mean()))


def kept_bytes(batch: int, tokens: float) -> float:
    """What weights, heads and the KV of so many tokens for each request take."""
    weights = LAYERS * LAYER_WEIGHTS + 2 * VOCAB * HIDDEN + NUM_HEADS * HIDDEN * HIDDEN
    return weights * ITEM + batch * tokens * KV_BYTES
