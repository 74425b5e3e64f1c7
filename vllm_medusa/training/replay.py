"""Accepted lengths without an engine: replay recorded greedy answers and count what each kind of tree would have saved.

Greedy verification accepts exactly the nodes that spell the answer, so the answer itself is enough. A step starts at
some row of the answer, emits the accepted path and the bonus token, and the next step starts behind them.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.training.calibrate import Guesses, fit_temperatures, guess, rank_accuracy
from vllm_medusa.training.hidden import HiddenRows
from vllm_medusa.tree.growth import grow_dynamic, grow_static
from vllm_medusa.tree.topology import Tree

Ints = npt.NDArray[np.int64]
STATIC_SIZES, DYNAMIC_SIZES = (8, 16, 63), (8, 16, 63)
# Where in an answer a step starts, in tokens: from the first, before the second.
PLACES = {"first 160": (0, 160), "160 to 400": (160, 400), "400 to 600": (400, 600), "beyond": (600, 2**31)}
PLACE_NODES = 16
_BATCH = 512


def replay(
    heads: MedusaHeads,
    rows: HiddenRows,
    *,
    temperatures: list[float] | None = None,
    accuracy: list[list[float]] | None = None,
    static_sizes: Sequence[int] = STATIC_SIZES,
    dynamic_sizes: Sequence[int] = DYNAMIC_SIZES,
) -> dict[str, float]:
    """Mean accepted length (tokens per step, the bonus token counted) of each kind of tree.

    Args:
        heads: bound to the target that gave the answers.
        rows: every row of the answers, greedy.
        temperatures: [K]; those of the heads' calibration, else fitted on these rows.
        accuracy: [K][R] for static trees; likewise.

    Returns:
        {"chain": 1.6, "static-8": 1.9, …, "dynamic-63": 2.4}.
    """
    calibration, top_k = heads.config.calibration, heads.config.top_k
    if temperatures is None:
        temperatures = calibration.temperatures if calibration is not None else fit_temperatures(heads, rows, top_k)
    guesses = guess(heads, rows, top_k, temperatures)
    if accuracy is None:
        accuracy = calibration.rank_accuracy if calibration is not None else rank_accuracy(guesses)
    return replay_guesses(guesses, rows, accuracy, static_sizes=static_sizes, dynamic_sizes=dynamic_sizes)


def replay_guesses(
    guesses: Guesses,
    rows: HiddenRows,
    accuracy: list[list[float]],
    *,
    static_sizes: Sequence[int] = STATIC_SIZES,
    dynamic_sizes: Sequence[int] = DYNAMIC_SIZES,
) -> dict[str, float]:
    """The same from calibrated guesses on all `rows`, without running the heads again."""
    answers = rows.sequences.astype(np.int64)
    lengths = {"chain": _length(accepted_by_fixed(Tree.chain(guesses.hits.shape[1]), guesses), answers)}
    for size in static_sizes:
        lengths[f"static-{size}"] = _length(accepted_by_fixed(grow_static(accuracy, size), guesses), answers)
    for size in dynamic_sizes:
        lengths[f"dynamic-{size}"] = _length(accepted_by_dynamic(size, guesses), answers)
    return {name: round(length, 4) for name, length in lengths.items()}


def accepted_by_fixed(tree: Tree, guesses: Guesses) -> Ints:
    """Nodes that would be accepted were a step to start at each row, int64 [n], for one tree drafted everywhere."""
    n = guesses.hits.shape[0]
    parents = np.broadcast_to(np.array(tree.parents, dtype=np.int64), (n, tree.num_nodes))
    ranks = np.broadcast_to(np.array(tree.ranks, dtype=np.int64), parents.shape)
    depths = np.broadcast_to(np.array(tree.depths[1:], dtype=np.int64), parents.shape)
    return _deepest_right(guesses, parents, ranks, depths)


def accepted_by_dynamic(num_nodes: int, guesses: Guesses) -> Ints:
    """The same for a tree grown at each row from its own probabilities."""
    counts = []
    for first in range(0, len(guesses.probabilities), _BATCH):
        grown = grow_dynamic(torch.from_numpy(guesses.probabilities[first : first + _BATCH]), num_nodes)
        parents, ranks, depths = grown.parents.numpy(), grown.ranks.numpy(), grown.depths.numpy()
        counts.append(_deepest_right(guesses, parents, ranks, depths, first))
    return np.concatenate(counts)


def _deepest_right(guesses: Guesses, parents: Ints, ranks: Ints, depths: Ints, first: int = 0) -> Ints:
    """Depth of the deepest node whose whole path is right, per row of parents/ranks/depths [n, N]; padding never is."""
    n, num_nodes = parents.shape
    every = np.arange(n)
    hits = guesses.hits[first : first + n]
    right = hits[every[:, None], np.maximum(depths - 1, 0), np.maximum(ranks, 0)] & (parents >= 0)
    alive = np.concatenate([np.ones((n, 1), dtype=bool), np.zeros((n, num_nodes), dtype=bool)], axis=1)
    for node in range(num_nodes):  # parents first, so one pass settles every path
        alive[:, node + 1] = right[:, node] & alive[every, np.maximum(parents[:, node], 0)]
    return np.where(alive[:, 1:], depths, 0).max(axis=1).astype(np.int64)


def replay_by_place(guesses: Guesses, rows: HiddenRows) -> dict[str, float]:
    """Mean accepted length by where in its answer a step starts, for dynamic trees of PLACE_NODES nodes.

    Heads that learnt from short answers may decline further on. Places where hardly anything is said are left out.

    Returns:
        {"first 160": 2.3, "400 to 600": 2.2, …}, of PLACES.
    """
    starts, jumps = _walk(accepted_by_dynamic(PLACE_NODES, guesses), rows.sequences.astype(np.int64))
    where = rows.positions[starts]
    lengths = {}
    for name, (first, end) in PLACES.items():
        here = jumps[(where >= first) & (where < end)]
        if len(here) >= 50:
            lengths[name] = round(float(here.mean()), 4)
    return lengths


def _length(accepted: Ints, answers: Ints) -> float:
    """Tokens per step over all answers."""
    _, jumps = _walk(accepted, answers)
    return float(jumps.sum()) / max(len(jumps), 1)


def _walk(accepted: Ints, answers: Ints) -> tuple[Ints, Ints]:
    """The row at which each step starts, and the tokens it emits: each answer is walked, over what its steps emit.

    The first token of an answer comes from prefill, not from a step. What a step emits past the answer's end is lost.
    """
    starts, jumps = [], []
    n = len(accepted)
    row = 0
    while row < n - 1:
        if answers[row + 1] != answers[row]:  # last row of an answer: nothing left to say
            row += 1
            continue
        jump = 1
        while jump <= accepted[row] and row + jump + 1 < n and answers[row + jump + 1] == answers[row]:
            jump += 1
        starts.append(row)
        jumps.append(jump)
        row += jump
    return np.array(starts, dtype=np.int64), np.array(jumps, dtype=np.int64)
