"""The walk against a slow one that follows one request at a time."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_medusa.tree.walk import greedy_walk, step_to_child


def slow_walk(target: list[int], nodes: list[int], parents: list[int]) -> tuple[list[int], list[int]]:
    rows, tokens = [0], [target[0]]
    while True:
        for node, parent in enumerate(parents):
            if parent == rows[-1] and nodes[node] == tokens[-1]:
                rows.append(node + 1)
                tokens.append(target[node + 1])
                break
        else:
            return rows, tokens


@st.composite
def drafts(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """(target tokens, node tokens, parents) over three token ids, so that long walks and equal siblings happen."""
    n = draw(st.integers(0, 20))
    token = st.integers(0, 2)
    parents = [draw(st.integers(max(0, i - 3), i)) for i in range(n)]
    return [draw(token) for _ in range(n + 1)], [draw(token) for _ in range(n)], parents


@given(st.lists(drafts(), min_size=1, max_size=4), st.integers(0, 2), st.booleans())
def test_walk_equals_slow_walk(batch: list[tuple[list[int], list[int], list[int]]], fill: int, known: bool) -> None:
    width = max(len(parents) for _, _, parents in batch)
    # Padding carries likely tokens and a live-looking parent: only num_nodes may keep the walk out of it.
    pad = [([*t, *[fill] * (width + 1 - len(t))], [*n, *[fill] * (width - len(n))], [*p, *[0] * (width - len(p))])
           for t, n, p in batch]  # fmt: skip
    target, nodes, parents = (torch.tensor([row[i] for row in pad]).reshape(len(batch), -1) for i in range(3))
    num_nodes = torch.tensor([len(p) for _, _, p in batch])
    walk = greedy_walk(target, nodes, parents, num_nodes, max_depth=width if known else None)
    assert walk.rows.shape == walk.tokens.shape
    for i, (t, n, p) in enumerate(batch):
        rows, tokens = slow_walk(t, n, p)
        length = int(walk.lengths[i])
        assert length == len(tokens)
        assert walk.rows[i, :length].tolist() == rows and walk.tokens[i, :length].tolist() == tokens
        assert (walk.rows[i, length:] == -1).all() and (walk.tokens[i, length:] == -1).all()
    if not known:
        assert walk.rows.shape[1] == int(walk.lengths.max())


def test_first_of_equal_siblings_wins() -> None:
    tree = torch.tensor([[7, 7, 9]]), torch.tensor([[0, 0, 2]]), torch.tensor([3])
    assert step_to_child(torch.tensor([0]), torch.tensor([7]), *tree).tolist() == [1]


def test_ended_walks_and_padding_stay_put() -> None:
    tokens, parents = torch.tensor([[5, 5]] * 3), torch.tensor([[-1, -1], [0, 1], [-1, -1]])
    rows = step_to_child(torch.tensor([-1, -1, 0]), torch.tensor([5, 5, 5]), tokens, parents, torch.tensor([2, 2, 0]))
    assert rows.tolist() == [-1, -1, -1]


def test_a_node_without_a_parent_is_no_child_of_the_root() -> None:
    """On the device trees are filled up with such nodes, and the scheduler may count them."""
    target, nodes = torch.tensor([[0, 5, 6]]), torch.tensor([[0, 0]])
    walk = greedy_walk(target, nodes, torch.tensor([[-1, -1]]), torch.tensor([2]), max_depth=2)
    assert walk.rows.tolist() == [[0, -1, -1]] and walk.tokens.tolist() == [[0, -1, -1]]
