"""The trees of one step: drafts remembered by request, laid out over the rows of a batch when they are scheduled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from vllm_medusa.proposer import DrawnTokens, TreeDraft
from vllm_medusa.tree.topology import ancestor_masks_of, depths_of, keep_nodes

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RequestDraft:
    """One request's row of a batch of drafts."""

    draft: TreeDraft
    row: int
    size: int

    @property
    def tokens(self) -> list[int]:
        """The drafted tokens, as the scheduler takes them."""
        tokens: list[int] = self.draft.tokens[self.row, : self.size].tolist()
        return tokens

    @property
    def parents(self) -> Ints:
        """int64 [size], row of each node's parent."""
        return self.draft.parents[self.row, : self.size]

    def only(self, kept: Ints) -> RequestDraft:
        """The same draft without the nodes that are not `kept`."""
        draft = TreeDraft(
            tokens=self.draft.tokens[self.row, kept][None],
            parents=keep_nodes(self.parents, kept)[None],
            ranks=self.draft.ranks[self.row, kept][None],
            reach=self.draft.reach[self.row, kept][None],
            sizes=np.array([len(kept)]),
        )
        return RequestDraft(draft, 0, len(kept))

    def alone(self) -> RequestDraft:
        """The same without the other requests of its batch."""
        if len(self.draft.sizes) == 1:
            return self
        one = slice(self.row, self.row + 1)
        drawn = self.draft.drawn
        draft = TreeDraft(
            tokens=self.draft.tokens[one].copy(),
            parents=self.draft.parents[one].copy(),
            ranks=self.draft.ranks[one].copy(),
            reach=self.draft.reach[one].copy(),
            sizes=self.draft.sizes[one].copy(),
            drawn=drawn and DrawnTokens(drawn.which[one], drawn.probabilities[one].clone(), drawn.token_map),
        )
        return RequestDraft(draft, 0, self.size)


class DraftBook:
    """Drafts by request id. The scheduler may come back for one steps later, cut to a prefix, or never."""

    def __init__(self) -> None:
        self._drafts: dict[str, RequestDraft] = {}

    def put(self, request: str, draft: TreeDraft, row: int, size: int) -> RequestDraft:
        """Remember the first `size` nodes of one row of `draft`."""
        entry = RequestDraft(draft, row, size)
        self._drafts[request] = entry
        return entry

    def settle(self, latest: TreeDraft) -> None:
        """Drafts of earlier batches that still wait are kept alone: a batch may hold what its candidates were drawn
        from, [B, K, V], and would be held as a whole by each request that waits."""
        for request, entry in self._drafts.items():
            if entry.draft is not latest and entry.draft.drawn is not None:
                self._drafts[request] = entry.alone()

    def keep(self, request: str, kept: Ints) -> None:
        """Cut a request's draft down to the nodes `kept` (int64 [n], ascending, ancestor-closed)."""
        entry = self._drafts.get(request)
        if entry is not None and len(kept) < entry.size:
            self._drafts[request] = entry.only(kept)

    def get(self, request: str, scheduled: Sequence[int]) -> RequestDraft | None:
        """The draft that `scheduled` tokens are a prefix of; None if these tokens are not ours (padding, say)."""
        entry = self._drafts.get(request)
        if entry is None or len(scheduled) > entry.size:
            return None
        return entry if entry.tokens[: len(scheduled)] == list(scheduled) else None

    def forget(self, requests: Iterable[str]) -> None:
        """Drop the drafts of requests that ended or lost their cache."""
        for request in requests:
            self._drafts.pop(request, None)

    def __len__(self) -> int:
        return len(self._drafts)


@dataclass(frozen=True)
class StepTrees:
    """R requests of one step with the nodes scheduled for each; N is the most nodes of any.

    A request whose nodes form a chain (or that has none) needs neither mask nor commit: rows, positions and slots
    agree. Drafts that are not ours are such chains, and cannot be accepted if they are padding.

    Attributes:
        requests: R request ids, in batch order.
        tokens: int64 [R, N], -1 beyond `sizes`.
        parents: int64 [R, N], -1 beyond `sizes`.
        ranks: int64 [R, N], as drafted; -1 beyond `sizes` and where drafts are not ours.
        reach: float32 [R, N], as drafted; 0 beyond `sizes` and where drafts are not ours.
        sizes: int64 [R], nodes of each request.
        first_token: int64 [R], index of each root among the step's tokens.
        first_logit: int64 [R], index of each root among the rows of logits.
        context: int64 [R], tokens in the cache before the root.
        drafts: what each request drafted, None where it is not ours.
        pure_decode: no request computes prompt tokens in this step.
    """

    requests: Sequence[str]
    tokens: Ints
    parents: Ints
    ranks: Ints
    reach: npt.NDArray[np.float32]
    sizes: Ints
    first_token: Ints
    first_logit: Ints
    context: Ints
    drafts: Sequence[RequestDraft | None]
    pure_decode: bool

    @cached_property
    def depths(self) -> Ints:
        """int64 [R, N + 1], depth of each row."""
        return depths_of(self.parents)

    @property
    def shift(self) -> Ints:
        """int64 [R, N + 1], from where the host puts each row to its depth: never positive."""
        shift: Ints = self.depths - np.arange(self.parents.shape[1] + 1)
        return shift

    @cached_property
    def is_tree(self) -> npt.NDArray[np.bool_]:
        """bool [R], requests with a node that does not follow the one before it."""
        follows = (self.parents == np.arange(self.parents.shape[1])) | (self.parents < 0)
        return np.asarray(~follows.all(axis=1))

    @cached_property
    def ancestors(self) -> npt.NDArray[np.uint64]:
        """uint64 [R, N + 1, W], ancestor bits of each row."""
        return ancestor_masks_of(self.parents)

    @cached_property
    def on_row(self) -> npt.NDArray[np.bool_]:
        """bool [R, N + 1], rows that exist (the root always)."""
        return np.arange(self.parents.shape[1] + 1) <= self.sizes[:, None]

    @property
    def num_nodes(self) -> int:
        """Nodes in the step."""
        return int(self.sizes.sum())

    @property
    def num_tokens(self) -> int:
        """Roots and nodes in the step."""
        return len(self.requests) + self.num_nodes

    def children(self, rows: Ints, sampled: Ints) -> Ints:
        """One round of a walk, as `tree.walk.step_to_child`: int64 [R], the child's row, -1 if there is none.

        Args:
            rows: int64 [R], where each request stands; -1 if its walk has ended.
            sampled: int64 [R], the token drawn from the target there.
        """
        if not self.num_nodes:
            return np.full_like(rows, -1)
        hit = (self.parents == rows[:, None]) & (self.tokens == sampled[:, None]) & self.on_row[:, 1:]
        return np.where(hit.any(axis=1) & (rows >= 0), hit.argmax(axis=1) + 1, -1)  # argmax: the first of equals

    def accepted_ranks(self, paths: Ints) -> Ints:
        """Ranks of the nodes on the rows `paths` [R, D + 1] (roots first, padded with -1): int64 [R, D], else -1."""
        if not self.num_nodes:
            return np.full((len(paths), paths.shape[1] - 1), -1, dtype=np.int64)
        nodes = paths[:, 1:] - 1
        return np.where(nodes >= 0, np.take_along_axis(self.ranks, np.maximum(nodes, 0), axis=1), -1)

    def token_rows(self, which: npt.NDArray[np.bool_]) -> Ints:
        """Indices, among the step's tokens, of all rows of the requests `which` [R], request by request."""
        index = self.first_token[:, None] + np.arange(self.parents.shape[1] + 1)
        rows: Ints = index[self.on_row & which[:, None]]
        return rows


def lay_trees(
    requests: Sequence[str],
    scheduled: Mapping[str, Sequence[int]],
    book: DraftBook,
    num_scheduled: npt.NDArray[np.integer],
    context: npt.NDArray[np.integer],
    known_tokens: npt.NDArray[np.integer],
) -> StepTrees:
    """Lay the scheduled drafts over the batch.

    Args:
        requests: R request ids in batch order.
        scheduled: draft tokens by request id.
        book: where their trees are remembered.
        num_scheduled: [R], tokens of each request in the step.
        context: [R], tokens in the cache before the step.
        known_tokens: [R], prompt and emitted tokens of each request.
    """
    count = len(requests)
    sizes = np.array([len(scheduled.get(request, ())) for request in requests], dtype=np.int64)
    width = int(sizes.max(initial=0))
    tokens = np.full((count, width), -1, dtype=np.int64)
    parents, ranks = np.full((2, count, width), -1, dtype=np.int64)
    reach = np.zeros((count, width), dtype=np.float32)
    drafts: list[RequestDraft | None] = []
    for row, (request, size) in enumerate(zip(requests, sizes.tolist(), strict=True)):
        draft = book.get(request, scheduled[request]) if size else None
        drafts.append(draft)
        if size:
            tokens[row, :size] = scheduled[request]
            if draft is None:
                parents[row, :size] = np.arange(size)
                continue
            parents[row, :size] = draft.parents[:size]
            ranks[row, :size] = draft.draft.ranks[draft.row, :size]
            reach[row, :size] = draft.draft.reach[draft.row, :size]
    logits_end = np.cumsum(sizes + 1)
    return StepTrees(
        requests=list(requests),
        tokens=tokens,
        parents=parents,
        ranks=ranks,
        reach=reach,
        sizes=sizes,
        first_token=np.cumsum(num_scheduled.astype(np.int64)) - (sizes + 1),
        first_logit=logits_end - (sizes + 1),
        context=context.astype(np.int64) + num_scheduled - (sizes + 1),
        drafts=drafts,
        pure_decode=bool((num_scheduled == sizes + 1).all() and (context + 1 >= known_tokens).all()),
    )
