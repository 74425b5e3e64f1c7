"""What is drafted after a step on Model Runner V1: for which requests, from which sources, how much."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_medusa.budget import NodeBudget
from vllm_medusa.cost import StepCost
from vllm_medusa.host.grammar import TreeDraftTokenIds
from vllm_medusa.host.metrics.figures import Learnt
from vllm_medusa.host.ranks import agreed_seconds
from vllm_medusa.host.startup import time_heads
from vllm_medusa.host.trees import DraftBook, StepTrees
from vllm_medusa.proposer import MedusaProposer, TreeDraft
from vllm_medusa.tree.lookup import Expected, Lookups
from vllm_medusa.trust import Trusts, at_temperature

if TYPE_CHECKING:
    from vllm_medusa.host.v1.runner import MedusaModelRunnerV1

DEEPEST_LOOKUP = 32  # tokens of a request's own text that a tree may hold in one path


class Drafting:
    """Drafts of one engine: from the heads, from requests' own texts, as many nodes as pay.

    Attributes:
        book: drafts by request, until they are scheduled.
        cost: seconds of a step by its tokens, without the heads.
        budget: shares nodes among requests.
        trusts: how much of what each request's drafts promise comes true.
        lookups: what requests' own texts expect next.
        heads_seconds: spent on asking the heads in this step.
    """

    def __init__(self, runner: MedusaModelRunnerV1, proposer: MedusaProposer) -> None:
        """Draft for the requests of `runner` with the heads of `proposer`."""
        self._runner = runner
        self.proposer = proposer
        self.settings = proposer.settings
        self.book = DraftBook()
        self.cost = StepCost()
        self.budget = NodeBudget(self.cost)
        self.trusts = Trusts()
        self.lookups = Lookups()
        self.heads_seconds = 0.0
        self._asked = True
        self._ended = 0.0  # when the last step ended; 0: it was none of decoding alone
        self._waited = 0.0  # seconds from then to this one

    def begin_step(self, ended: Collection[str]) -> None:
        """Drop what is known of requests that ended, lost their cache or begin; nothing is spent on heads yet."""
        self._waited = time.perf_counter() - self._ended if self._ended else 0.0
        self._ended = 0.0
        self.book.forget(ended)
        self.lookups.forget(ended)
        self.trusts.forget(ended)
        self.heads_seconds = 0.0

    def next_drafts(
        self, emitted: list[list[int]], last_logit: npt.NDArray[np.int64], hidden_rows: Tensor
    ) -> list[list[int]]:
        """Draft for every request that can use it, and remember the trees.

        Args:
            emitted: R lists, tokens of this step.
            last_logit: int64 [R], among the step's rows of logits the one on which each walk ended.
            hidden_rows: [rows of logits, H].

        Returns:
            R lists of node tokens, empty where nothing is drafted.
        """
        drafts: list[list[int]] = [[] for _ in emitted]
        asking = [row for row, tokens in enumerate(emitted) if tokens and self._wants_draft(row)]
        if not asking:
            return drafts
        others = len(emitted) - len(asking)
        self._asked = not self.settings.adaptive or self.budget.asks_heads(len(asking), others)
        device = hidden_rows.device
        hidden = hidden_rows[torch.from_numpy(last_logit[asking]).to(device)] if self._asked else hidden_rows[:0]
        draft = self._runner._draft(asking, hidden, torch.tensor([emitted[row][-1] for row in asking], device=device))
        batch = self._runner.input_batch
        ids = batch.req_ids
        draft = self._at_temperatures(draft, batch.temperature_cpu[asking])
        for row in asking:
            self.trusts.add(ids[row], float(batch.temperature_cpu[row]))
        sizes = draft.sizes
        if self.settings.adaptive:
            lengths = batch.num_tokens_no_spec[: len(emitted)]
            context = lengths[asking].astype(np.int64)
            sizes = self.budget.share(
                draft.reach,
                draft.sizes,
                others,
                without_heads=draft.lookup_reach,
                trust=self.trusts.shares([ids[row] for row in asking], self.cost.clock),
                context=context,
                other_keys=float(lengths.sum() - context.sum()),
            )
        for position, row in enumerate(asking):
            if sizes[position] > 0:
                drafts[row] = self.book.put(ids[row], draft, position, int(sizes[position])).tokens
        self.book.settle(draft)
        return drafts

    def draft(self, rows: list[int], hidden: Tensor, roots: Tensor) -> TreeDraft:
        """Trees for the batch's `rows`, from texts alone if the heads are not worth asking.

        Arguments as in `MedusaProposer.propose`.
        """
        expected = self._expected(rows)
        if not self._asked:
            return self.proposer.from_texts(expected)
        began = time.perf_counter()
        temperatures = self._drawing_temperatures(rows)
        generators = None
        if temperatures is not None:
            seeded = self._runner.input_batch.generators
            generators = {place: seeded[row] for place, row in enumerate(rows) if row in seeded}
        draft = self.proposer.propose(hidden, roots, temperatures, generators, expected)
        self.heads_seconds = time.perf_counter() - began
        if self.settings.adaptive:
            self.heads_seconds = agreed_seconds(self.heads_seconds)
        self.budget.heads_cost.observe(len(rows), self.heads_seconds)
        return draft

    def learn(self, trees: StepTrees, lengths: npt.NDArray[np.int64], seconds: float) -> None:
        """Learn from one step of decoding alone: R emitted `lengths`, and its `seconds`, heads included."""
        if self.settings.adaptive:
            seconds = agreed_seconds(seconds)
            if self._waited:
                self.budget.between.observe(agreed_seconds(self._waited))
        self._ended = time.perf_counter()
        keys, node_keys = trees.context.sum(), (trees.context * trees.sizes).sum()
        seconds -= self.heads_seconds
        self.budget.tries.earn(self.cost.observe(trees.num_tokens, seconds, float(keys), float(node_keys)))
        promised = trees.reach.sum(axis=1)
        ours = np.flatnonzero(promised)
        if len(ours):
            names = [trees.requests[row] for row in ours]
            self.trusts.learn(names, promised[ours], (lengths[ours] - 1).astype(np.float32), self.cost.clock)

    def measure_heads(self, most: int) -> None:
        """Time the heads for up to `most` requests."""

        def propose(hidden: Tensor, roots: Tensor) -> TreeDraft:
            return self.proposer.propose(hidden, roots, expected=Expected.nothing(len(roots), 1))

        for requests, seconds in time_heads(self.proposer, propose, most):
            self.budget.heads_cost.seed(requests, seconds)

    def report(self) -> dict[str, Any]:
        """What is learnt while serving.

        `cost`: step times by tokens, without the heads; `heads_cost`: their time by requests; `trust`: the share of
        promised tokens that came true; `lookup_odds`: how often a match of 1, 2, ... tokens goes on.
        """
        return {
            "cost": self.cost.table(),
            "heads_cost": self.budget.heads_cost.table(),
            "trust": round(self.trusts.every.share, 4),
            "lookup_odds": self.lookups.odds(),
        }

    def learnt(self) -> Learnt:
        """The same for the metrics: see `Learnt`."""
        return Learnt(self.trusts.every.share, self.cost.by_size(), self.budget.heads_cost.by_size())

    def with_shapes(self, drafts: Any) -> Any:
        """What the scheduler fetches after a step: for requests with a grammar the shape of their trees too."""
        if drafts is None:
            return None
        parents = {
            request: entry.parents[: len(tokens)].tolist()
            for request, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
            if tokens and self._has_grammar(request) and (entry := self.book.get(request, tokens)) is not None
        }
        return TreeDraftTokenIds(drafts.req_ids, drafts.draft_token_ids, parents) if parents else drafts

    def _expected(self, rows: list[int]) -> Expected:
        if not self.settings.prompt_lookup:
            return Expected.nothing(len(rows))
        batch = self._runner.input_batch
        texts = [
            (batch.req_ids[row], batch.token_ids_cpu[row], int(length))
            for row, length in zip(rows, batch.num_tokens_no_spec[rows], strict=True)
        ]
        return self.lookups.follow(texts, min(DEEPEST_LOOKUP, self.settings.num_speculative_tokens))

    def _at_temperatures(self, draft: TreeDraft, temperatures: npt.NDArray[np.float32]) -> TreeDraft:
        """Lower the reach of sampled requests (float32 [B], 0: not sampled), except of drawn candidates."""
        if draft.drawn is not None:
            temperatures = np.where(draft.drawn.which, 0.0, temperatures)
        if not (temperatures > 0.0).any():
            return draft
        bare = draft.lookup_reach
        return replace(
            draft,
            reach=at_temperature(draft.reach, temperatures),
            lookup_reach=None if bare is None else at_temperature(bare, temperatures),
        )

    def _drawing_temperatures(self, rows: list[int]) -> Tensor | None:
        """float32 [len(rows)], at which candidates are drawn; 0 where the likeliest are taken.

        Under a grammar always the likeliest: a node that the grammar prunes would be missing from the draw.
        """
        if self.settings.draft_sample_method == "greedy":
            return None
        asked = [self._runner.requests[self._runner.input_batch.req_ids[row]].sampling_params for row in rows]
        return torch.tensor([p.temperature if p and p.structured_outputs is None else 0.0 for p in asked])

    def _wants_draft(self, row: int) -> bool:
        """Not when the next token is the request's last, and not under a thinking budget: the host counts calls."""
        request = self._runner.requests[self._runner.input_batch.req_ids[row]]
        params = request.sampling_params
        if params is None or params.thinking_token_budget is not None:
            return False
        return params.max_tokens is None or len(request.output_token_ids) + 1 < params.max_tokens

    def _has_grammar(self, request: str) -> bool:
        state = self._runner.requests.get(request)
        params = state.sampling_params if state is not None else None
        return params is not None and params.structured_outputs is not None
