"""Model Runner V1 with trees: propose, forward, walk, commit."""

from __future__ import annotations

import time
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_medusa.host.checked_rows import CheckedRows
from vllm_medusa.host.commit import find_moves
from vllm_medusa.host.grammar import KEPT
from vllm_medusa.host.guard import AcceptanceGuard
from vllm_medusa.host.metrics.figures import FIGURES, SEND_SECONDS, Counts, Figures
from vllm_medusa.host.nans import nans_of_paths
from vllm_medusa.host.ranks import is_first_rank
from vllm_medusa.host.startup import log_choices, logger, time_steps
from vllm_medusa.host.statistics import Statistics
from vllm_medusa.host.target import part_of
from vllm_medusa.host.trees import StepTrees, lay_trees
from vllm_medusa.host.v1.drafting import Drafting
from vllm_medusa.host.v1.emission import Ends
from vllm_medusa.host.v1.sampling import StepRows, TreeSampler
from vllm_medusa.kept import Kept
from vllm_medusa.proposer import MedusaProposer, TreeDraft
from vllm_medusa.tree.walk import Walk

if TYPE_CHECKING:
    from vllm_medusa.host.tree_cache import TreeCache
    from vllm_medusa.host.v1.device_cache import ScatteredTreeCache


class MedusaModelRunnerV1(GPUModelRunner):
    """The host's runner, with four seams filled in, in the order of a step.

    `_prepare_inputs` lays the scheduled trees over the batch and gives nodes their depth as position;
    `_build_attention_metadata` tells the attention layers what tree rows may see; `_sample` walks and commits;
    `propose_draft_token_ids` drafts the next trees. Everything else is the host's.
    """

    drafter: MedusaProposer

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        """Build the host's runner and put our sampler, draft book and cost model beside it."""
        # The host refuses processors of the user's own under speculation; our walk runs them as plain decoding does.
        model_config = vllm_config.model_config
        self._own_processors, model_config.logits_processors = model_config.logits_processors, None
        try:
            super().__init__(vllm_config, device)
        finally:
            model_config.logits_processors = self._own_processors
        self.tree_sampler = TreeSampler(self.sampler)
        self.rejection_sampler = self.tree_sampler
        self._all_logits_processors()
        self.drafter.part_of = part_of
        if self.drafter.settings.draft_sample_method == "probabilistic":
            self.tree_sampler.judge_proposals()
        self.drafting = Drafting(self, self.drafter)
        self.book = self.drafting.book
        self.statistics = Statistics()
        self.guard = AcceptanceGuard(self.drafter.settings.heads, logger)
        self.guard.judged = not is_first_rank()
        self.trees: StepTrees | None = None
        self.tree_cache: TreeCache | ScatteredTreeCache | None = None
        self._started = 0.0
        self._learnt_due = 0.0  # when the engine core is told again what has been learnt

    # Start-up ---------------------------------------------------------------------------------------------------

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Once layers have their caches: adopt them and learn how keys lie in a block."""
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        self._all_logits_processors()  # the host may have built its batch anew
        self.tree_cache = self._make_cache(self.compilation_config.static_forward_context, kv_cache_config)

    def _make_cache(self, layers: Any, kv_cache_config: Any) -> TreeCache | ScatteredTreeCache:
        """Adopt the layers of a GPU."""
        from vllm_medusa.host.v1.device_cache import ScatteredTreeCache

        return ScatteredTreeCache(layers, kv_cache_config)

    @property
    def _kernel(self) -> str:
        """What attends to trees."""
        assert self.tree_cache is not None
        return self.tree_cache.kernel

    def warm_up_trees(self) -> None:
        """On a GPU: compile kernels of ours, and look at their results."""
        cache: Any = self.tree_cache
        cache.warm_up(self.num_spec_tokens)

    def _all_logits_processors(self) -> None:
        """Every processor that plain decoding runs: min_p and logit_bias, plugins, the user's own.

        Under speculation the host builds min_tokens alone. A processor reads a request's tokens from the list it is
        handed once; it must not count calls instead, since rows whose walk has ended are asked again.
        """
        plain = copy(self.vllm_config)
        plain.speculative_config = None
        custom = self._own_processors or ()
        self.input_batch.logitsprocs = build_logitsprocs(plain, self.device, False, False, custom)
        self.input_batch.logitsprocs_need_output_token_ids = bool(custom)
        thinking = self.input_batch.thinking_budget_state_holder
        if thinking is not None:  # the walk samples one row per request, as without speculation
            thinking.in_spec_mode, thinking.num_spec_tokens = False, 0
        self.input_batch.sampling_metadata = self.input_batch._make_sampling_metadata()

    def measure_step_cost(self, kept: Kept) -> None:
        """Seed the cost model with the target's steps and with the heads. A second or two."""
        if not self.drafter.settings.adaptive:
            return
        for tokens, seconds in time_steps(
            self, min(self.max_num_tokens, self.max_num_reqs * (1 + self.num_spec_tokens)), kept
        ):
            self.drafting.cost.seed(tokens, seconds)
        self.drafting.measure_heads(self.max_num_reqs)

    def load_heads_again(self) -> None:
        """The engine wakes up without weights: the heads are read from their files."""
        self.drafter.load_again()

    def log_choices(self, products: str | None = None) -> None:
        """One line that says what serves; `products`: what multiplies with the target's matrices."""
        log_choices(self.drafter, "Model Runner V1", self._kernel, "vLLM's sampler at each depth", products)

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        """The host's dry step: it has no trees. Engines that step together run one where they have nothing to do."""
        self.trees = None
        return super()._dummy_run(*args, **kwargs)

    # Forward ----------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """The host's forward pass, timed."""
        self._started = time.perf_counter()
        self.trees = None
        self.statistics.begin_step()
        begun = [request.req_id for request in scheduler_output.scheduled_new_reqs]  # a session's next turn is one, too
        ended = (*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ()), *begun)
        self.drafting.begin_step(ended)
        with self.statistics.stage("forward"):
            return super().execute_model(scheduler_output, *args, **kwargs)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: npt.NDArray[np.int32]) -> Any:
        """Flat slots come from the host; the position of a node is its depth below the root."""
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        batch = self.input_batch
        for request, kept in getattr(scheduler_output, KEPT, {}).items():
            self.book.keep(request, kept)
        self.trees = trees = lay_trees(
            batch.req_ids,
            scheduler_output.scheduled_spec_decode_tokens,
            self.book,
            num_scheduled_tokens,
            batch.num_computed_tokens_cpu[: batch.num_reqs],
            batch.num_tokens_no_spec[: batch.num_reqs],
        )
        if trees.is_tree.any():
            rows = torch.from_numpy(trees.token_rows(trees.is_tree)).to(self.device)
            shift = torch.from_numpy(trees.shift[trees.on_row & trees.is_tree[:, None]]).to(self.device)
            self.positions[rows] += shift
            self._shift = rows, shift
        return prepared

    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
        """Positions of several dimensions (M-RoPE), which are equal behind a prompt: a node's are its depth too.

        The model gets the buffer that is shifted here. The host may have filled it once more (pruned videos).
        """
        prepared = super()._preprocess(*args, **kwargs)
        if self.uses_mrope and self.trees is not None and self.trees.is_tree.any():
            rows, shift = self._shift
            self.mrope_positions.gpu[:, rows] += shift
        return prepared

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Attach the step's trees to the host's metadata of each KV cache group."""
        by_layer, common = super()._build_attention_metadata(*args, **kwargs)
        if self.trees is not None and self.trees.is_tree.any():
            assert self.tree_cache is not None
            self.tree_cache.attach(by_layer, self.attn_groups, CheckedRows.of(self.trees))
        return by_layer, common

    # Walk and commit --------------------------------------------------------------------------------------------

    def sample_tokens(self, grammar_output: Any) -> Any:
        """The host's second half of a step: sampling (our walk and commit), bookkeeping, drafting; timed."""
        began = time.perf_counter()
        forward = began - self._started
        output = super().sample_tokens(grammar_output)
        trees, walk, seconds = self.trees, self.tree_sampler.walk, None
        if trees is not None and walk is not None and trees.pure_decode:
            seconds = forward + time.perf_counter() - began
            self.drafting.learn(trees, walk.lengths.numpy(), seconds)
        counts = self.statistics.end_step(seconds)
        if counts is not None:
            self._send(counts, output)
        return output

    def _sample(self, logits: Tensor | None, spec_decode_metadata: Any) -> Any:
        """Walk the trees by the host's Sampler, then commit the accepted paths."""
        trees = self.trees
        if trees is None:
            return super()._sample(logits, spec_decode_metadata)
        unfinished = self.discard_request_mask.np[: len(trees.requests)].astype(bool)
        states = [self.requests[request] for request in trees.requests]
        histories = [state.output_token_ids for state in states]
        ends = Ends(states, self.max_model_len)
        self.tree_sampler.rows = StepRows(trees, histories, unfinished, ends)
        with self.statistics.stage("walk"):
            output = super()._sample(logits, spec_decode_metadata)
        walk = self.tree_sampler.walk
        assert walk is not None
        paths = walk.rows.numpy()
        with self.statistics.stage("commit"):
            self._commit(trees, paths)
        decoding = ~unfinished & (trees.context >= self.input_batch.num_prompt_tokens[: len(trees.requests)])
        roots = self.input_batch.token_ids_cpu[np.arange(len(trees.requests)), trees.context]
        tokens = walk.tokens.numpy()
        emitted = ends.lengths(tokens, walk.lengths.numpy())
        self.statistics.count(trees, roots, paths, tokens, emitted, decoding)
        if trees.num_nodes and not self.guard.judged:
            self._watch_heads(trees, paths, decoding)
        return output

    def _watch_heads(self, trees: StepTrees, paths: npt.NDArray[np.int64], decoding: npt.NDArray[np.bool_]) -> None:
        """Count how often a head's own candidate was accepted first; what only the text expected is not their merit."""
        top_k = self.drafter.top_k
        asked = decoding & ((trees.ranks >= 0) & (trees.ranks < top_k)).any(axis=1)
        first = trees.accepted_ranks(paths)[:, :1]
        accepted = asked & ((first >= 0) & (first < top_k)).any(axis=1)
        self.guard.watch(int(asked.sum()), int(accepted.sum()))

    def _commit(self, trees: StepTrees, paths: npt.NDArray[np.int64]) -> None:
        if trees.is_tree.any():
            assert self.tree_cache is not None
            self.tree_cache.commit(*map(torch.from_numpy, find_moves(trees, paths)))

    def _get_nans_in_logits(self, logits: Tensor | None) -> dict[str, int]:
        """Of the rows from which a request's tokens were drawn; the host counts as if there were one for each request.

        `VLLM_COMPUTE_NANS_IN_LOGITS` asks for it.
        """
        trees, walk = self.trees, self.tree_sampler.walk
        if logits is None or trees is None or walk is None:
            return super()._get_nans_in_logits(logits)
        counts = nans_of_paths(logits, torch.from_numpy(trees.first_logit), walk.rows)
        # The host reads a count from each row, by request: so many NaNs in a row of its own.
        columns = torch.arange(max(1, int(counts.max())), device=counts.device)
        return super()._get_nans_in_logits(torch.where(columns < counts[:, None], torch.nan, 0.0))

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        """Hide the generators of requests whose sample is discarded.

        The host winds them back by `set_offset`, which CPU generators refuse; our walk does not draw from them.
        """
        batch = self.input_batch
        hidden = {
            int(row): batch.generators.pop(int(row))
            for row in np.flatnonzero(self.discard_request_mask.np[: batch.num_reqs])
            if int(row) in batch.generators
        }
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            batch.generators.update(hidden)

    # Propose ----------------------------------------------------------------------------------------------------

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """Always: heads have no positions of their own, and the scheduler cuts a tree to a prefix that fits."""
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: Tensor,
        sample_hidden_states: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> list[list[int]]:
        """Draft from the hidden row of the last node on each path; requests that get no nodes get an empty list."""
        trees, walk = self.trees, self.tree_sampler.walk
        most = scheduler_output.num_spec_tokens_to_schedule  # by the user's table, where there is one
        if trees is None or walk is None or not most:
            return [[] for _ in sampled_token_ids]
        with self.statistics.stage("propose"):
            drafts = self.drafting.next_drafts(
                sampled_token_ids, trees.first_logit + _last_rows(walk), sample_hidden_states
            )
        return [tokens[:most] for tokens in drafts]

    def _draft(self, rows: list[int], hidden: Tensor, roots: Tensor) -> TreeDraft:
        """Trees for the batch's `rows`, from their hidden rows [len(rows), H] and root tokens int64 [len(rows)]."""
        return self.drafting.draft(rows, hidden, roots)

    def take_draft_token_ids(self) -> Any:
        """What the scheduler fetches after a step."""
        return self.drafting.with_shapes(super().take_draft_token_ids())

    # Figures ----------------------------------------------------------------------------------------------------

    def _send(self, counts: Counts, output: Any) -> None:
        """Give the step's figures to the engine core (`MedusaScheduler.update_from_output`), beside its tokens."""
        counts.candidates = self.drafter.top_k
        now, learnt = time.perf_counter(), None
        if now >= self._learnt_due:
            learnt, self._learnt_due = self.drafting.learnt(), now + SEND_SECONDS
        setattr(output, FIGURES, Figures(counts, learnt))

    def medusa_report(self, reset: bool = False) -> dict[str, Any]:
        """Totals since the last reset (see `Statistics.report`), and what `Drafting.report` has learnt so far."""
        report = self.statistics.report()
        report["kernel"] = self._kernel
        report["candidates"] = self.drafter.top_k
        report |= self.drafting.report()
        if reset:
            self.statistics = Statistics()
        return report


def _last_rows(walk: Walk) -> npt.NDArray[np.int64]:
    """int64 [R], the row on which each walk ended."""
    last: npt.NDArray[np.int64] = walk.rows.gather(1, walk.lengths[:, None] - 1)[:, 0].numpy()
    return last
