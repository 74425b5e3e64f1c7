"""After the commit the slots behind the root hold exactly the accepted path, on the host's real cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engines import Engine, random_tree

from vllm_medusa.host.commit import TreeKeyValues, find_moves
from vllm_medusa.host.trees import DraftBook, lay_trees
from vllm_medusa.proposer import TreeDraft
from vllm_medusa.tree.topology import Tree

slow = pytest.mark.slow  # an engine starts

BATCH = 4


def steps_of(trees: list[Tree], contexts: list[int]):
    """The step in which each request checks its tree, as the host would schedule it; tokens are tags."""
    book, scheduled, names = DraftBook(), {}, [f"r{i}" for i in range(len(trees))]
    for number, (name, tree) in enumerate(zip(names, trees, strict=True)):
        n = tree.num_nodes
        tokens = np.arange(n, dtype=np.int64)[None] + 1000 * (number + 1)
        draft = TreeDraft(
            tokens, np.array([tree.parents]), np.array([tree.ranks]), np.ones((1, n), np.float32), np.array([n])
        )
        scheduled[name] = book.put(name, draft, 0, n).tokens
    counts = np.array([tree.num_rows for tree in trees])
    context = np.array(contexts)
    return lay_trees(names, scheduled, book, counts, context, context + 1)


def value_rows(layer, slots: torch.Tensor) -> torch.Tensor:
    """First channel of head 0 of the values in `slots`: values lie row by row."""
    blocks, heads, block_size, width = layer.kv_cache.shape
    values = layer.kv_cache.view(blocks, heads, 2 * block_size, width // 2)[:, 0, block_size:, 0]
    return values[slots // block_size, slots % block_size]


@slow
@pytest.mark.parametrize("way", ["move", "write again"])
@pytest.mark.parametrize("alignment", [0, 1, 6, 7, 15, 16, 25, 26, 30, 31])
def test_every_path_of_a_26_node_tree(tiny_medusa: Engine, alignment, way):
    runner = tiny_medusa.runner
    layers = [layer for layer in runner.compilation_config.static_forward_context.values()]
    rng = np.random.default_rng(alignment)
    trees = [random_tree(rng, 26) for _ in range(BATCH)]
    block_size = layers[0].kv_cache.shape[2]
    contexts = [block_size * (1 + i) + alignment for i in range(BATCH)]
    step = steps_of(trees, contexts)
    # Blocks far apart and out of order, four to a request.
    tables = rng.permutation(np.arange(1, 1 + 8 * BATCH)).reshape(BATCH, 8)

    def slot_of(request: int, position: int) -> int:
        return int(tables[request][position // block_size]) * block_size + position % block_size

    slots = torch.tensor([slot_of(r, contexts[r] + row) for r in range(BATCH) for row in range(27)])
    kept = TreeKeyValues(layers)
    heads, size = layers[0].num_kv_heads, layers[0].head_size
    tags = torch.tensor([1000.0 * (r + 1) + row for r in range(BATCH) for row in range(27)])
    for number, layer in enumerate(layers):
        rows = (tags + 0.25 * number)[:, None, None].expand(-1, heads, size).contiguous()
        layer.impl.do_kv_cache_update(layer, -rows, rows, layer.kv_cache, slots)
        kept.keep(layer.layer_name, -rows, rows, None)
    before = [layer.kv_cache.clone() for layer in layers]
    leaves = [[row for row in range(1, 27) if not tree.children(row)] for tree in trees]
    for turn in range(max(map(len, leaves))):
        paths = [[0, *tree.path(leaf[turn % len(leaf)])] for tree, leaf in zip(trees, leaves, strict=True)]
        width = max(map(len, paths))
        padded = np.array([path + [-1] * (width - len(path)) for path in paths])
        sources, targets = find_moves(step, padded)
        for layer, was in zip(layers, before, strict=True):
            layer.kv_cache.copy_(was)
        taken = slots[torch.from_numpy(targets)]
        if way == "move":
            runner.tree_cache.movers[0].move(slots[torch.from_numpy(sources)], taken)
        else:  # every row of the step is a tree row here
            kept.write(torch.from_numpy(sources), {layer.layer_name: taken for layer in layers})
        for number, layer in enumerate(layers):
            expected = before[number].clone()
            for request, path in enumerate(paths):
                here = torch.tensor([slot_of(request, contexts[request] + depth) for depth in range(len(path))])
                found = value_rows(layer, here)
                assert found.tolist() == [1000.0 * (request + 1) + row + 0.25 * number for row in path]
                rows = found[:, None, None].expand(-1, heads, size).contiguous()
                layer.impl.do_kv_cache_update(layer, -rows, rows, expected, here)
            assert torch.equal(layer.kv_cache, expected), "keys too, and nothing else was touched"
    runner.input_batch.block_table.clear()
    for layer in layers:
        layer.kv_cache.zero_()


def test_chains_move_nothing():
    step = steps_of([Tree.chain(5), Tree((0, 0, 1))], [10, 20])
    sources, targets = find_moves(step, np.array([[0, 1, 2, 3], [0, 1, 3, -1]]))
    # The chain moves nothing; row 3 of the other tree takes the slot of its row 2.
    assert sources.tolist() == [6 + 3] and targets.tolist() == [6 + 2]


def test_drafts_that_are_not_ours_count_as_a_chain():
    book = DraftBook()
    step = lay_trees(["a"], {"a": [-1, -1, -1]}, book, np.array([4]), np.array([7]), np.array([8]))
    assert step.parents.tolist() == [[0, 1, 2]] and not step.is_tree.any() and step.drafts == [None]


def test_a_cut_tree_is_a_prefix():
    tree = Tree((0, 0, 1, 2, 3))
    book = DraftBook()
    draft = TreeDraft(
        np.array([[5, 6, 7, 8, 9]]),
        np.array([tree.parents]),
        np.array([tree.ranks]),
        np.ones((1, 5), np.float32),
        np.array([5]),
    )
    book.put("a", draft, 0, 5)
    assert book.get("a", [5, 6, 7]) is not None
    assert book.get("a", [5, 6, 8]) is None, "other tokens are another draft"
    step = lay_trees(["a"], {"a": [5, 6, 7]}, book, np.array([4]), np.array([7]), np.array([8]))
    assert step.parents.tolist() == [[0, 0, 1]] and step.depths.tolist() == [[0, 1, 1, 2]]
    book.forget(["a"])
    assert len(book) == 0
