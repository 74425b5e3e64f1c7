"""Trees under a grammar: pruned before they cost a forward pass, and one mask per node from its own path.

This half runs where the host keeps its grammar matchers: in the engine core, not in the worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.outputs import DraftTokenIds

from vllm_medusa.tree.topology import keep_nodes

Ints = npt.NDArray[np.int64]
KEPT = "medusa_kept"  # on a SchedulerOutput: by request id, which nodes of the worker's draft are left
EVERY_TOKEN = -1  # a mask word that allows all of its 32 tokens


@dataclass
class TreeDraftTokenIds(DraftTokenIds):
    """The host's drafts, and the shape of trees whose request has a grammar.

    Attributes:
        parents: [N] by request id, -1 for padding.
        whole: trees stay as they were drafted (on a device); what a grammar forbids is masked, not left out.
    """

    parents: dict[str, list[int]] = field(default_factory=dict)
    whole: bool = False


@dataclass(frozen=True)
class GrammarTree:
    """What is left of a request's tree.

    Attributes:
        tokens: n kept tokens.
        parents: int64 [n], row of each kept node's parent.
        kept: int64 [n], which nodes of the worker's draft they are.
    """

    tokens: list[int]
    parents: Ints
    kept: Ints

    @classmethod
    def whole(cls, tokens: Sequence[int], parents: Sequence[int]) -> GrammarTree:
        """A draft of which every node is kept."""
        return cls(list(tokens), np.asarray(parents, dtype=np.int64), np.arange(len(tokens)))

    def children(self, row: int) -> Iterator[int]:
        """Rows of the node's children, in order."""
        return iter((self.parents == row).nonzero()[0] + 1)

    def leaves(self) -> Iterator[list[int]]:
        """Each path from a child of the root down to a leaf, as rows; padding is on none of them."""
        for leaf in np.setdiff1d(np.flatnonzero(self.parents >= 0) + 1, self.parents):
            rows, row = [], int(leaf)
            while row > 0:
                rows.append(row)
                row = int(self.parents[row - 1])
            yield rows[::-1]

    def is_drafted_in(self, scheduled: Sequence[int]) -> bool:
        """Whether these scheduled tokens are this tree or a prefix of it."""
        return 0 < len(scheduled) <= len(self.tokens) and self.tokens[: len(scheduled)] == list(scheduled)


def prune(grammar: Any, request: str, tokens: Sequence[int], parents: Sequence[int]) -> GrammarTree:
    """Keep the nodes that the grammar allows after their own path.

    Args:
        grammar: the request's matcher (the host's `StructuredOutputGrammar`); its state is the same afterwards.
        request: request id, for the host's messages.
        tokens: N drafted tokens.
        parents: N rows of parents, parents first.
    """
    whole = GrammarTree.whole(tokens, parents)
    kept = np.sort(np.array([row - 1 for row in _allowed_rows(grammar, request, whole) if row], dtype=np.int64))
    return _keep(whole, kept)


def likeliest_chain(tokens: Sequence[int], parents: Sequence[int]) -> GrammarTree:
    """The path of first children: what is left where the host itself must read drafts as one sequence."""
    whole = GrammarTree.whole(tokens, parents)
    kept, row = [], 0
    while (child := next(whole.children(row), None)) is not None:
        kept.append(child - 1)
        row = child
    return _keep(whole, np.array(kept, dtype=np.int64))


def fill_masks(grammar: Any, request: str, tree: GrammarTree, size: int, mask: torch.Tensor) -> None:
    """One mask for the root and one for each of the first `size` nodes: what may follow the node's path.

    Rows that the walk cannot reach allow everything, since a row without any allowed token would sample NaN.

    Args:
        grammar: the request's matcher; its state is the same afterwards.
        request: request id.
        tree: the scheduled tree.
        size: n, how many of its nodes are scheduled.
        mask: int32 [1 + n or more, V / 32], filled in place.
    """
    mask.fill_(EVERY_TOKEN)
    cut = GrammarTree(tree.tokens[:size], tree.parents[:size], tree.kept[:size])
    for row in _allowed_rows(grammar, request, cut):
        if not grammar.is_terminated():
            grammar.fill_bitmask(mask, row)


def _allowed_rows(grammar: Any, request: str, tree: GrammarTree) -> Iterator[int]:
    """Rows in depth-first order, each while the matcher stands after its path."""

    def below(row: int) -> Iterator[int]:
        yield row
        for child in tree.children(row):
            token = [tree.tokens[child - 1]]
            # Ask before accepting: matchers log errors for, or break on, a token they must refuse.
            if grammar.is_terminated() or grammar.validate_tokens(token) != token:
                continue
            if grammar.accept_tokens(request, token):
                yield from below(child)
                grammar.rollback(1)

    yield from below(0)


def _keep(whole: GrammarTree, kept: Ints) -> GrammarTree:
    return GrammarTree([whole.tokens[node] for node in kept], keep_nodes(whole.parents, kept), kept)
