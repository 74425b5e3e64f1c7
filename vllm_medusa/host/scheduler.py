"""The scheduler of a Medusa engine: the host's own, with trees where a request has a grammar."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_medusa.config import SETTINGS_KEY
from vllm_medusa.host.compat import grammar_rows_have_fixed_stride
from vllm_medusa.host.draft_room import DraftRoom
from vllm_medusa.host.grammar import (
    EVERY_TOKEN,
    KEPT,
    GrammarTree,
    TreeDraftTokenIds,
    fill_masks,
    likeliest_chain,
    prune,
)
from vllm_medusa.host.metrics.cuts import CUTS, Cut
from vllm_medusa.host.metrics.figures import FIGURES, Outbox
from vllm_medusa.host.metrics.stats import leave_out, leave_out_of_request, with_figures
from vllm_medusa.host.step_size import even_out

WIDTHS = "medusa_widths"  # on a ModelRunnerOutput: nodes of each request by the number of requests, from now on


class MedusaScheduler(Scheduler):
    """The host's scheduler. It reads drafts as one sequence; trees under a grammar are read here instead."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> MedusaScheduler:
        """The one of the two that the config asks for: a class of one's own must know of asynchronous scheduling."""
        is_async = vllm_config.scheduler_config.async_scheduling
        return super().__new__(MedusaAsyncScheduler if is_async else cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build the host's scheduler and take over the masks of trees."""
        super().__init__(*args, **kwargs)
        self.dynamic_sd_lookup: list[int] | None
        settings = self.vllm_config.additional_config[SETTINGS_KEY]
        if settings["widths"] is not None:
            most, nodes = self.scheduler_config.max_num_seqs, self.num_spec_tokens
            self.dynamic_sd_lookup = build_dynamic_sd_schedule_lookup(settings["widths"], most, nodes)
        if self.dynamic_sd_lookup is None:
            # A new request with one token left would get as many drafts of -1 as a tree may have nodes, so that steps
            # keep the shape of a captured CUDA graph. Ours have any shape; and with a tree larger than
            # max_num_batched_tokens the request would wait for ever, larger than long_prefill_token_threshold end the
            # engine. The host leaves this padding out where the number of drafts depends on the batch.
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)
        # Without `adaptive` a tree is what the user says, and Model Runner V2 drafts widths of its own; a connector has
        # seen the plan already.
        adaptive = bool(settings["adaptive"])
        self._evens_out = adaptive and not self.vllm_config.use_v2_model_runner and self.connector is None
        self._draft_room = DraftRoom(self)
        self._outbox = Outbox()
        self._tells_cuts = bool(self.vllm_config.use_v2_model_runner)  # V1 finds ends by itself
        self._planned = self._read = 0  # numbers of the latest plan, and of the one whose outcome is being read
        self._cuts: list[Cut] = []  # found since the latest plan
        self._host_stats: SpecDecodingStats | None = None  # of the step that is read now
        self._grammar_trees: dict[str, GrammarTree] = {}
        self._tree_mask: torch.Tensor | None = None
        self._sequence_bitmask = self.structured_output_manager.grammar_bitmask
        self.structured_output_manager.grammar_bitmask = self._grammar_bitmask

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take the worker's drafts; trees under a grammar lose the nodes it forbids."""
        draft_token_ids = self._of_running(draft_token_ids)
        parents = draft_token_ids.parents if isinstance(draft_token_ids, TreeDraftTokenIds) else {}
        if not parents:
            return super().update_draft_token_ids(draft_token_ids)
        drafts = dict(zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True))
        trees = {}
        for name, rows in parents.items():
            request = self.requests.get(name)
            if request is None or request.is_finished() or request.is_prefill_chunk or name not in drafts:
                continue
            tokens = drafts[name]
            if draft_token_ids.whole:
                if request.use_structured_output:
                    trees[name] = GrammarTree.whole(drafts.pop(name), rows)
                    request.spec_token_ids = list(tokens)
            elif self._is_constrained(request):
                trees[name] = prune(request.structured_output_request.grammar, name, tokens, rows)
                drafts.pop(name)
                request.spec_token_ids = list(trees[name].tokens)
            else:  # a reasoning model still thinks: only the host knows where in a sequence the grammar begins
                trees[name] = likeliest_chain(tokens, rows)
                drafts[name] = list(trees[name].tokens)
        self._grammar_trees |= trees
        super().update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))

    def _of_running(self, drafted: DraftTokenIds) -> DraftTokenIds:
        """Drafts without those of sessions whose turn has just ended: the next turn says something else first."""
        waits = {name for name in drafted.req_ids if _waits(self.requests.get(name))}
        if not waits:
            return drafted
        kept = [pair for pair in zip(drafted.req_ids, drafted.draft_token_ids, strict=True) if pair[0] not in waits]
        names, tokens = [name for name, _ in kept], [drafts for _, drafts in kept]
        return replace(drafted, req_ids=names, draft_token_ids=tokens)

    def update_draft_token_ids_in_output(self, draft_token_ids: DraftTokenIds, scheduler_output: Any) -> None:
        """The same for a step that was scheduled before its drafts were known; none of them is left out."""
        drafts = dict(zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True))
        parents = draft_token_ids.parents if isinstance(draft_token_ids, TreeDraftTokenIds) else {}
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        for name, rows in parents.items():
            request = self.requests.get(name)
            if request is None or request.is_finished() or not request.use_structured_output:
                continue
            size = len(scheduled.get(name, ()))
            tokens = drafts.pop(name)[:size]
            if size:
                self._grammar_trees[name] = GrammarTree.whole(tokens, rows[:size])
                scheduled[name] = tokens
        super().update_draft_token_ids_in_output(DraftTokenIds(list(drafts), list(drafts.values())), scheduler_output)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """The host's plan of a step, in which drafts come last, with the pruned trees the worker has to know of."""
        self._draft_room.cut_drafts()
        output = super().schedule(*args, **kwargs)
        self._draft_room.look_at(output)
        if self._tells_cuts:
            self._planned += 1
            setattr(output, CUTS, (self._planned, self._cuts))
            self._cuts = []
        if self._grammar_trees:
            for name in output.finished_req_ids:
                self._grammar_trees.pop(name, None)
            kept = {
                name: tree.kept[: len(tokens)]
                for name, tokens in output.scheduled_spec_decode_tokens.items()
                if (tree := self._scheduled_tree(name, tokens)) is not None
            }
            setattr(output, KEPT, kept)
        return output

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """The host counts what is planned as computed; before, drafts that may be cut make the step's size even."""
        if self._evens_out:
            even_out(scheduler_output)
        super()._update_after_schedule(scheduler_output)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """The host's reading of a step; the figures that lie beside its tokens are gathered."""
        self._host_stats = None
        self.dynamic_sd_lookup = getattr(model_runner_output, WIDTHS, self.dynamic_sd_lookup)
        figures = getattr(model_runner_output, FIGURES, None)
        if figures is not None and self.log_stats:
            self._outbox.put(figures)
        self._read = getattr(scheduler_output, CUTS, (0, ()))[0]
        if self._tells_cuts:
            self._cut_what_nobody_gets(scheduler_output, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _cut_what_nobody_gets(self, plan: Any, output: Any) -> None:
        """Steps that were planned before it was known that a request ends, or is computed again."""
        for name in plan.num_scheduled_tokens if output.sampled_token_ids else ():
            request = self.requests.get(name)
            stale = request is not None and request.num_stale_output_tokens > 0 and request.drop_stale_output
            if request is None or request.is_finished() or stale:
                walked = len(output.sampled_token_ids[output.req_id_to_index[name]])
                if walked:
                    self._cuts.append(Cut(self._read, name, walked, 0))

    def has_finished_requests(self) -> bool:
        """Whether the worker is to be told something that the host's next plan, be it empty, brings."""
        return bool(super().has_finished_requests() or self._cuts)

    def make_spec_decoding_stats(self, *args: Any, **kwargs: Any) -> Any:
        """The host's counts of drafts, which it makes before it looks for the end of a request."""
        self._host_stats = super().make_spec_decoding_stats(*args, **kwargs)
        return self._host_stats

    def _update_request_with_output(self, request: Any, new_token_ids: list[int], *args: Any, **kwargs: Any) -> Any:
        """The host appends tokens up to the request's end; what was accepted behind it counts as accepted no longer."""
        walked, accepted = len(new_token_ids), len(new_token_ids) - 1  # vLLM shortens the list itself
        emitted, stopped = super()._update_request_with_output(request, new_token_ids, *args, **kwargs)
        if len(emitted) < walked and self._tells_cuts:
            self._cuts.append(Cut(self._read, request.request_id, walked, len(emitted)))
        if len(emitted) < accepted:
            if self._host_stats is not None:
                leave_out(self._host_stats, len(emitted), accepted)
            if getattr(request, "spec_decode_metrics", None) is not None:
                leave_out_of_request(request.spec_decode_metrics, len(emitted), accepted)
        if stopped:
            _forget_behind_the_end(request)
        return emitted, stopped

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """The host's report to a front end, now and then with the figures gathered."""
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            figures = self._outbox.take(time.monotonic(), idle=not self.has_unfinished_requests())
            if figures is not None:
                stats.spec_decoding_stats = with_figures(stats.spec_decoding_stats, figures, self.num_spec_tokens)
        return stats

    def _scheduled_tree(self, name: str, tokens: Sequence[int]) -> GrammarTree | None:
        tree = self._grammar_trees.get(name)
        return tree if tree is not None and tree.is_drafted_in(tokens) else None

    def _is_constrained(self, request: Any) -> bool:
        """Whether the grammar holds from the next token on."""
        return bool(self.structured_output_manager._get_constraint_bounds(request, ()).constraint_start == 0)

    def _grammar_bitmask(
        self, requests: dict[str, Any], names: list[str], scheduled: dict[str, list[int]]
    ) -> npt.NDArray[np.int32] | None:
        """Stand in for the manager's: its own rows for sequences, ours for trees, in the order of `names`."""
        trees = {name: self._scheduled_tree(name, scheduled.get(name, ())) for name in names}
        if not any(tree is not None for tree in trees.values()):
            return self._sequence_rows(requests, names, scheduled)
        parts = []
        for name, tree in trees.items():
            if tree is not None and self._is_constrained(requests[name]):
                parts.append(self._tree_rows(requests[name], tree, len(scheduled[name])))
            elif tree is not None:
                parts.append(self._path_rows(requests, name, tree, len(scheduled[name])))
            else:
                masks = self._sequence_rows(requests, [name], scheduled)
                assert masks is not None
                parts.append(masks.copy())
        return np.concatenate(parts)

    def _sequence_rows(
        self, requests: dict[str, Any], names: list[str], scheduled: dict[str, list[int]]
    ) -> npt.NDArray[np.int32] | None:
        """The manager's own masks. It would keep room for the largest tree of every request that may ever run at once;
        here its room grows with what steps need."""
        manager, most = self.structured_output_manager, 1 + self.vllm_config.num_speculative_tokens
        fixed = grammar_rows_have_fixed_stride()
        rows = sum(most if fixed else 1 + len(scheduled.get(name, ())) for name in names)
        room = 0 if manager._grammar_bitmask is None else len(manager._grammar_bitmask)
        if room < rows:
            rows = min(max(rows, 2 * room), self.max_num_running_reqs * most)
            manager._grammar_bitmask = manager.backend.allocate_token_bitmask(rows)
        masks: npt.NDArray[np.int32] | None = self._sequence_bitmask(requests, names, scheduled)
        return masks

    def _path_rows(self, requests: dict[str, Any], name: str, tree: GrammarTree, size: int) -> npt.NDArray[np.int32]:
        """Masks of a tree in which only the host knows where the grammar begins: asked for path by path.

        A path is cut before the first token that is forbidden: no row behind it can be reached.
        """
        rows = self._empty_rows(size)
        rows.fill_(EVERY_TOKEN)
        filled: npt.NDArray[np.int32] = rows.numpy().copy()
        cut = GrammarTree(tree.tokens[:size], tree.parents[:size], tree.kept[:size])
        for path in [*cut.leaves()] or [[]]:
            tokens = [tree.tokens[row - 1] for row in path]
            allowed = self.structured_output_manager.validate_tokens(requests[name], tokens)
            masks = self._sequence_rows(requests, [name], {name: allowed})
            assert masks is not None
            for row, mask in zip([0, *path][: len(allowed) + 1], masks, strict=False):
                filled[row] = mask
        return filled

    def _empty_rows(self, size: int) -> torch.Tensor:
        """Room for the masks of a request with `size` scheduled nodes, as many rows as the host keeps for it."""
        most = 1 + self.vllm_config.num_speculative_tokens
        if self._tree_mask is None:
            self._tree_mask = self.structured_output_manager.backend.allocate_token_bitmask(most)
        return self._tree_mask[: most if grammar_rows_have_fixed_stride() else 1 + size]

    def _tree_rows(self, request: Any, tree: GrammarTree, size: int) -> npt.NDArray[np.int32]:
        rows = self._empty_rows(size)
        fill_masks(request.structured_output_request.grammar, request.request_id, tree, size, rows)
        filled: npt.NDArray[np.int32] = rows.numpy().copy()
        return filled


class MedusaAsyncScheduler(MedusaScheduler, AsyncScheduler):
    """The same over the host's asynchronous scheduler, which plans a step before it knows the outcome of the last."""


def _forget_behind_the_end(request: Any) -> None:
    """A request that ends in the middle of an accepted path has not computed what was dropped behind its end.

    The host goes on from there with a session's next turn (`StreamingInput`). The last token is not computed yet, but
    for what a step that runs already may do. vLLM 0.33 takes off what was dropped by itself; then nothing changes here.
    """
    most = request.num_tokens - 1 + request.num_output_placeholders
    request.num_computed_tokens = min(request.num_computed_tokens, most)


def _waits(request: Any) -> bool:
    """Whether a session's turn has ended; with or without another one that waits its turn."""
    waiting = (RequestStatus.WAITING, RequestStatus.WAITING_FOR_STREAMING_REQ)
    return request is not None and request.resumable and request.status in waiting
