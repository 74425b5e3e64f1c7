"""Replay against a slow engine of ten lines: draft, compare with the answer, jump."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.training.calibrate import fit_temperatures, guess, rank_accuracy
from vllm_medusa.training.hidden import HiddenRows
from vllm_medusa.training.replay import PLACE_NODES, PLACES, accepted_by_dynamic, replay, replay_by_place
from vllm_medusa.tree.growth import grow_dynamic, grow_static
from vllm_medusa.tree.topology import Tree

VOCAB = 24
Nodes = tuple[list[int], list[int], list[int]]  # parents, ranks, depths


def naive_length(rows: HiddenRows, tokens: np.ndarray, tree_at: Callable[[int], Nodes]) -> float:
    """Decode every answer step by step with the tree that stands at each row."""
    steps = emitted = 0
    for number in np.unique(rows.sequences):
        (where,) = np.nonzero(rows.sequences == number)
        answer, at = rows.tokens[where].tolist(), 0
        while at < len(answer) - 1:
            parents, ranks, depths = tree_at(int(where[at]))
            accepted = {0: 0}
            for node, (parent, rank, depth) in enumerate(zip(parents, ranks, depths, strict=True)):
                said = answer[at + depth] if at + depth < len(answer) else None
                if parent in accepted and tokens[where[at], depth - 1, rank] == said:
                    accepted[node + 1] = depth
            jump = min(max(accepted.values()) + 1, len(answer) - 1 - at)
            steps, emitted, at = steps + 1, emitted + jump, at + jump
    return emitted / steps


@pytest.fixture
def heads(target: torch.Tensor) -> MedusaHeads:
    heads = MedusaHeads(HeadsConfig(num_heads=3, num_layers=1, hidden_size=16, vocab_size=VOCAB, top_k=4))
    generator = torch.Generator().manual_seed(1)
    for parameter in heads.parameters():
        parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    heads.bind(target, target)
    return heads.requires_grad_(False)


@pytest.fixture
def rows(record: Callable[..., HiddenRows], target: torch.Tensor) -> HiddenRows:
    """Answers that repeat their token often, so that heads that repeat are often right; one answer of one token."""
    rng = np.random.default_rng(0)
    answers = [np.repeat(rng.integers(0, VOCAB, 12), rng.integers(1, 5, 12)).tolist() for _ in range(8)] + [[3], [4, 4]]
    hidden = [target[torch.tensor(a)] + 0.6 * torch.from_numpy(rng.normal(size=(len(a), 16))).float() for a in answers]
    return record(answers, hidden)


def test_replay_equals_decoding_step_by_step(heads: MedusaHeads, rows: HiddenRows) -> None:
    guesses = guess(heads, rows, 4, fit_temperatures(heads, rows, 4))
    accuracy = rank_accuracy(guesses)
    found = replay(heads, rows, static_sizes=(1, 5, 20), dynamic_sizes=(1, 5, 20))

    def fixed(tree: Tree) -> Callable[[int], Nodes]:
        return lambda _: (list(tree.parents), list(tree.ranks), list(tree.depths[1:]))

    def grown(size: int) -> Callable[[int], Nodes]:
        trees = grow_dynamic(torch.from_numpy(guesses.probabilities), size)
        return lambda row: tuple(part[row].tolist() for part in (trees.parents, trees.ranks, trees.depths))

    assert found["chain"] == pytest.approx(naive_length(rows, guesses.tokens, fixed(Tree.chain(3))), abs=1e-3)
    for size in (1, 5, 20):
        static = naive_length(rows, guesses.tokens, fixed(grow_static(accuracy, size)))
        assert found[f"static-{size}"] == pytest.approx(static, abs=1e-3)
        dynamic = naive_length(rows, guesses.tokens, grown(size))
        assert found[f"dynamic-{size}"] == pytest.approx(dynamic, abs=1e-3)
    assert 1.2 < found["chain"] < 4.0  # the example is not a trivial one


def test_larger_trees_never_accept_less(heads: MedusaHeads, rows: HiddenRows) -> None:
    found = replay(heads, rows, static_sizes=(2, 8, 32), dynamic_sizes=(2, 8, 32))
    # A larger tree holds the smaller one, but jumps change where steps start: allow for a step or two of 250 tokens.
    for kind in ("static", "dynamic"):
        assert found[f"{kind}-2"] <= found[f"{kind}-8"] + 0.02 <= found[f"{kind}-32"] + 0.04


def test_lengths_by_place_are_those_of_the_steps_that_start_there(
    record: Callable[..., HiddenRows], heads: MedusaHeads
) -> None:
    rng = np.random.default_rng(5)
    answers = [rng.integers(0, VOCAB, int(length)).tolist() for length in (700, 420, 90, 650)]
    rows = record(answers)
    guesses = guess(heads, rows, heads.config.top_k, [1.0] * heads.config.num_heads)
    guesses.hits[:] = rng.random(guesses.hits.shape) < 0.15  # as if heads knew something
    late = rows.positions >= 600
    guesses.hits[late] = False  # but for long answers
    found = replay_by_place(guesses, rows)
    assert set(found) == set(PLACES)
    assert found["beyond"] == pytest.approx(1.0, abs=0.02) and found["first 160"] > 1.3
    accepted = accepted_by_dynamic(PLACE_NODES, guesses)
    starts, at = [], 0
    while at < len(rows) - 1:  # all of it once more, a row at a time
        if rows.sequences[at + 1] != rows.sequences[at]:
            at += 1
            continue
        left = int((rows.sequences[at + 1 :] == rows.sequences[at]).sum())
        starts.append((int(rows.positions[at]), min(int(accepted[at]) + 1, left)))
        at += starts[-1][1]
    here = [jump for place, jump in starts if 400 <= place < 600]
    assert found["400 to 600"] == pytest.approx(np.mean(here), abs=1e-3)
