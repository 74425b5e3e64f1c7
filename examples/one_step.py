"""One step with a tree of six nodes, computed by the code that serves; docs/architecture.md shows what it prints.

    python examples/one_step.py

No model and no engine: what three heads guess and what the target says are written down below.
"""

import numpy as np
import torch

from vllm_medusa.host.commit import find_moves
from vllm_medusa.host.trees import DraftBook, StepTrees, lay_trees
from vllm_medusa.proposer import TreeDraft
from vllm_medusa.tree.lookup import Expected
from vllm_medusa.tree.mixture import grow_mixture
from vllm_medusa.tree.walk import Walk, greedy_walk

WORDS = ["the", "cat", "dog", "sat", "ran", "away", "down", "again", "?"]  # the vocabulary: a token is a place in it
CACHED = 20  # tokens in the KV cache before the root, "the"
GUESSES = [[("cat", 0.6), ("dog", 0.2)], [("sat", 0.4), ("ran", 0.35)], [("away", 0.7), ("down", 0.1)]]
SAYS = {"the": "cat", "cat": "ran", "ran": "away", "away": "again"}  # the target, greedy, by the last token


def propose() -> TreeDraft:
    """The six nodes most likely to be reached, over the candidates of three heads."""
    tokens = np.array([[[WORDS.index(word) for word, _ in head] for head in GUESSES]])
    probabilities = np.array([[[share for _, share in head] for head in GUESSES]], dtype=np.float32)
    return TreeDraft(*grow_mixture(tokens, probabilities, Expected.nothing(1), num_nodes=6))


def lay(draft: TreeDraft) -> StepTrees:
    """The tree over the rows of a batch with one request, "a", which has `CACHED` tokens in the cache."""
    book = DraftBook()
    scheduled = {"a": book.put("a", draft, row=0, size=6).tokens}
    return lay_trees(["a"], scheduled, book, np.array([7]), np.array([CACHED]), np.array([CACHED + 1]))


def walk(step: StepTrees) -> Walk:
    """From the root to the child that carries the target's token, until there is none."""
    rows = ["the", *(WORDS[token] for token in step.tokens[0])]
    said = torch.tensor([[WORDS.index(SAYS.get(word, "?")) for word in rows]])
    return greedy_walk(said, *(torch.from_numpy(part) for part in (step.tokens, step.parents, step.sizes)))


def main() -> None:
    """Propose, lay out, walk, commit: a table each."""
    draft = propose()
    step = lay(draft)
    rows = ["the", *(WORDS[token] for token in step.tokens[0])]
    print("Propose", "row  token  parent  depth  rank  reach", sep="\n")
    for row, word in enumerate(rows):
        if row == 0:
            print("  0  the         -      0     -   1.000")
            continue
        parent, rank, reach = (values[0, row - 1] for values in (step.parents, step.ranks, step.reach))
        print(f"{row:3}  {word:5} {parent:7} {step.depths[0, row]:6} {rank:5} {reach:7.3f}")

    print("\nForward", "row  token  slot  position  ancestors", sep="\n")
    for row, word in enumerate(rows):
        slot, position = step.context[0] + row, step.context[0] + step.depths[0, row]
        print(f"{row:3}  {word:5} {slot:5} {position:9}  {int(step.ancestors[0, row, 0]):06b}")

    path = walk(step)
    print("\nWalk", "on row  token  the target says  step to row", sep="\n")
    for place, row in enumerate(path.rows[0].tolist()):
        following = path.rows[0, place + 1].item() if place + 1 < path.rows.shape[1] else "none: the step ends"
        print(f"{row:6}  {rows[row]:5}  {WORDS[int(path.tokens[0, place])]:15}  {following}")

    sources, targets = find_moves(step, path.rows.numpy())
    slots = dict(enumerate(rows, start=CACHED))
    after = dict(slots)
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        after[CACHED + target] = after[CACHED + source]
    length = CACHED + int(path.lengths[0])
    print("\nCommit", "slot  before  after", sep="\n")
    for slot, word in slots.items():
        print(f"{slot:4}  {word:6}  {after[slot] if slot < length else '(free)'}")
    moves = ", ".join(f"{CACHED + s} to {CACHED + t}" for s, t in zip(sources.tolist(), targets.tolist(), strict=True))
    print(f"moved: {moves}; next root: {WORDS[int(path.tokens[0, -1])]!r}, slot {length}")


if __name__ == "__main__":
    main()
