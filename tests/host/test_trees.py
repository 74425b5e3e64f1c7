"""Laying trees over a batch: which token, logit and position each row has."""

from __future__ import annotations

import numpy as np

from vllm_medusa.host.trees import DraftBook, lay_trees
from vllm_medusa.proposer import TreeDraft


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
