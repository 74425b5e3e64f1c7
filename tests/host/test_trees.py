"""Laying trees over a batch: which token, logit and position each row has."""

from __future__ import annotations

import numpy as np
import torch
from engines import random_tree

from vllm_medusa.host.trees import DraftBook, lay_trees
from vllm_medusa.proposer import DrawnTokens, TreeDraft
from vllm_medusa.tree.walk import step_to_child


def test_a_mixed_batch():
    """A prompt piece, a plain decode, a tree and a chain in one step."""
    book = DraftBook()
    tree = TreeDraft(
        np.array([[11, 12, 13, 14]]),
        np.array([[0, 1, 0, 1]]),
        np.array([[0, 0, 1, 1]]),
        np.ones((1, 4), np.float32),
        np.array([4]),
    )
    book.put("tree", tree, 0, 4)
    names = ["prompt", "plain", "tree", "chain"]
    scheduled = {"tree": [11, 12, 13, 14], "chain": [7, 8]}
    step = lay_trees(
        names, scheduled, book, np.array([9, 1, 5, 3]), np.array([0, 40, 50, 60]), np.array([30, 41, 51, 61])
    )
    assert step.sizes.tolist() == [0, 0, 4, 2]
    assert step.first_token.tolist() == [8, 9, 10, 15]
    assert step.first_logit.tolist() == [0, 1, 2, 7]
    assert step.context.tolist() == [8, 40, 50, 60]
    assert step.is_tree.tolist() == [False, False, True, False]
    assert step.token_rows(step.is_tree).tolist() == [10, 11, 12, 13, 14]
    assert step.depths[2].tolist() == [0, 1, 2, 1, 2]
    assert step.num_nodes == 6 and step.num_tokens == 10
    assert not step.pure_decode


def test_decode_only_steps_are_known():
    step = lay_trees(["a", "b"], {}, DraftBook(), np.array([1, 1]), np.array([4, 9]), np.array([5, 10]))
    assert step.pure_decode and step.tokens.shape == (2, 0)
    prompt = lay_trees(["a"], {}, DraftBook(), np.array([1]), np.array([4]), np.array([9]))
    assert not prompt.pure_decode


def test_a_walk_goes_to_the_same_children_in_either_form():
    rng = np.random.default_rng(0)
    for _ in range(50):
        book, scheduled = DraftBook(), {}
        names = [str(row) for row in range(int(rng.integers(1, 6)))]
        for name in names:
            nodes = int(rng.integers(0, 9))
            tree, tokens = random_tree(rng, nodes), rng.integers(0, 4, (1, nodes))
            parents = np.array([tree.parents], dtype=np.int64).reshape(1, nodes)
            draft = TreeDraft(
                tokens, parents, np.zeros_like(parents), np.ones((1, nodes), np.float32), np.array([nodes])
            )
            scheduled[name] = book.put(name, draft, 0, nodes).tokens
        scheduled = {name: tokens for name, tokens in scheduled.items() if tokens}
        counts = np.array([len(scheduled.get(name, ())) + 1 for name in names])
        step = lay_trees(names, scheduled, book, counts, np.full(len(names), 7), np.full(len(names), 8))
        rows = np.array([int(rng.integers(-1, count)) for count in counts])
        sampled = rng.integers(0, 4, len(names))
        tree_tensors = (torch.from_numpy(values) for values in (step.tokens, step.parents, step.sizes))
        wanted = step_to_child(torch.from_numpy(rows), torch.from_numpy(sampled), *tree_tensors)
        assert step.children(rows, sampled).tolist() == wanted.tolist()


def test_what_candidates_were_drawn_from_is_held_once_for_each_request_that_waits():
    """Sixteen requests, of which each was drafted in another step and then waits: not sixteen batches are held."""
    batch, heads, vocab = 16, 4, 50
    book = DraftBook()
    for step in range(batch):
        probabilities = torch.rand(batch, heads, vocab)
        whole = np.zeros((batch, 3), dtype=np.int64)
        drawn = DrawnTokens(np.ones(batch, dtype=bool), probabilities, None)
        sizes = np.full(batch, 3)
        draft = TreeDraft(whole + step, whole, whole, whole.astype(np.float32), sizes, drawn=drawn)
        for row in range(step, batch):  # the ones before wait
            book.put(str(row), draft, row, 3)
        book.settle(draft)
        entry = book.get("0", [0, 0, 0])
        assert entry is not None and entry.draft.drawn is not None
        if step == 0:
            first = probabilities[0].clone()
        assert torch.equal(entry.draft.drawn.probabilities[entry.row], first)
    held = {
        entry.draft.drawn.probabilities.untyped_storage().data_ptr(): entry.draft.drawn.probabilities.nbytes
        for row in range(batch)
        if (entry := book.get(str(row), [row] * 3)) is not None and entry.draft.drawn is not None
    }
    assert sum(held.values()) <= 2 * batch * heads * vocab * 4
    assert len(held) == batch
