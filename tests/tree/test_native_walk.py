"""The compiled greedy walk against the one in torch."""

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_medusa.tree import native
from vllm_medusa.tree.walk import greedy_walk

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")


def random_step(rng: np.random.Generator, vocab: int, dtype: torch.dtype):
    """Trees of different sizes, logits full of ties."""
    batch, width = int(rng.integers(1, 6)), int(rng.integers(0, 12))
    sizes = rng.integers(0, width + 1, batch)
    parents = np.full((batch, width), -1, dtype=np.int64)
    for request, size in enumerate(sizes):
        parents[request, :size] = [int(rng.integers(0, node + 1)) for node in range(size)]
    tokens = np.where(parents >= 0, rng.integers(0, 3, (batch, width)), -1)
    first = np.cumsum(sizes + 1) - (sizes + 1)
    logits = torch.from_numpy(rng.integers(-3, 3, (int((sizes + 1).sum()), vocab)).astype(np.float32))
    logits[:, :3] += torch.from_numpy(rng.integers(0, 3, (len(logits), 3)).astype(np.float32))
    return logits.to(dtype), first, tokens, parents, sizes


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([3, 64, 200]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_same_walk(seed, vocab, dtype):
    logits, first, tokens, parents, sizes = random_step(np.random.default_rng(seed), vocab, dtype)
    walks = np.random.default_rng(seed).random(len(sizes)) < 0.8
    found = native.greedy_walk(logits, first, walks, tokens, parents, sizes)
    assert found is not None
    best = logits.float().argmax(-1).numpy()  # the first of equals
    rows = first[:, None] + np.arange(tokens.shape[1] + 1)
    target = torch.from_numpy(best[np.minimum(rows, len(best) - 1)])
    walk = greedy_walk(
        *(torch.from_numpy(part) for part in (target.numpy(), tokens, parents, np.where(walks, sizes, 0)))
    )
    assert [part.tolist() for part in found] == [part.tolist() for part in walk]


def test_rows_that_are_not_reached_may_hold_anything():
    logits = torch.tensor([[0.0, 1.0], [float("nan"), 0.0]])
    step = (np.array([0]), np.array([True]), np.array([[0]]), np.array([[0]]), np.array([1]))
    found = native.greedy_walk(logits, *step)
    assert found is not None and found[1].tolist() == [[1]]
    assert native.greedy_walk(logits.flip(0), *step) is None  # the host decides what a NaN means
    assert native.greedy_walk(logits.double(), *step) is None
    assert native.greedy_walk(torch.zeros(3, 2).T, *step) is None


@pytest.mark.slow
def test_ties_fall_as_the_host_lets_them():
    from vllm.v1.sample.sampler import Sampler

    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randint(0, 40, (64, 49152), generator=generator).to(dtype)
        ones = np.zeros((64, 0), np.int64)
        found = native.greedy_walk(logits, np.arange(64), np.ones(64, bool), ones, ones, np.zeros(64, np.int64))
        assert found is not None
        assert found[1][:, 0].tolist() == Sampler.greedy_sample(logits.to(torch.float32)).tolist()
