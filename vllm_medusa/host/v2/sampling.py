"""The walk on Model Runner V2: the host's own Sampler draws, on the device, and nothing waits for the host.

Random numbers of this runner are a function of the request's seed, the row's position and the token. A node has its
depth as position, so the token drawn at a node is the one that plain decoding would draw there, in whatever order or
company rows are sampled. So all rows are sampled at once and walked afterwards; where that costs more, or the tokens
before a row count, only the rows on which requests stand are sampled, one depth after the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from vllm_medusa.host.nans import nans_of_paths
from vllm_medusa.host.v2.clock import StageClock
from vllm_medusa.host.v2.slots import SlotTrees, StepTrees
from vllm_medusa.tree.walk import Walk, greedy_walk, step_to_child

# Rows that cost as much to process as a round of the walk does for being one: about 0.1 ms of launches, against a few
# passes over a row of 128 Ki float32 at 4 TB/s. Predicted, not measured.
ROWS_OF_A_ROUND = 64


class _Rows(NamedTuple):
    """The step's rows of logits.

    Attributes:
        logits: [L, V]; grammar masks are applied.
        positions: int64 [L], of the rows' tokens.
        tokens: int32 [L], the rows' tokens, -1 where a draft met a mask that allows everything.
        lengths: int32 [R], on the host, no sequence is longer.
    """

    logits: Tensor
    positions: Tensor
    tokens: Tensor
    lengths: npt.NDArray[np.int32]


class TreeSampler:
    """Stands where the host has its rejection sampler. See `host.v1.sampling.TreeSampler` for why it is lossless."""

    def __init__(self, sampler: Sampler, trees: SlotTrees, clock: StageClock[Any]) -> None:
        """Walk `trees` with the host's `sampler`, telling the `clock`."""
        self.sampler, self.trees, self.clock = sampler, trees, clock

    def __call__(
        self, logits: Tensor, batch: Any, draft_logits: Tensor | None = None, invalid_drafts: Tensor | None = None
    ) -> SamplerOutput:
        """Walk the step's trees.

        Args:
            logits: [L, V], one row for each root and node; grammar masks are applied.
            batch: the host's batch.
            draft_logits: unused; nodes are the heads' likeliest tokens.
            invalid_drafts: bool [L], drafts that the host's grammar masks do not cover; they are not accepted.

        Returns:
            Emitted tokens int64 [R, D + 1], padded with -1, and what else the host wants to know of them.
        """
        step = self.trees.step
        assert step is not None and step.batch is batch
        self.clock.mark("forward")
        tokens = batch.input_ids[batch.logits_indices]
        rows = _Rows(
            logits,
            batch.positions[batch.logits_indices],
            tokens if invalid_drafts is None else tokens.masked_fill(invalid_drafts, -1),
            batch.seq_lens_cpu_upper_bound.numpy(),
        )
        walk, processed = (self._walk_at_once if self._at_once(rows, step) else self._walk_by_depth)(rows, step)
        step.walk = walk
        nans = nans_of_paths(logits, step.first_logit, walk.rows) if self.sampler.compute_nans else None
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            walk.lengths.to(torch.int32),
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            self.sampler.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=walk.tokens,
            logprobs_tensors=self._logprobs(logits, processed, step, walk),
            num_nans=nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _at_once(self, rows: _Rows, step: StepTrees) -> bool:
        """Whether to sample all rows first and walk afterwards.

        Where all requests take the likeliest token as the logits are, any row costs next to nothing. Else rows are
        copied and processed, a gigabyte at most.
        """
        slots, (count, vocab) = step.batch.idx_mapping_np, rows.logits.shape
        greedy = self.sampler.sampling_states.temperature.np[slots] == 0.0
        if greedy.all() and not self.sampler.needs_logits_processing[slots].any():
            return True
        most = min(get_max_chunk_logits(vocab), ROWS_OF_A_ROUND * (1 + self.trees.depth_of(step)))
        return count <= most and not self._reads_history(slots)

    def _reads_history(self, slots: npt.NDArray[np.intp]) -> bool:
        """Whether a request's logits depend on the tokens before a row, beyond their number."""
        thinking = self.sampler.thinking_budget_state
        return bool(
            any(_reads_history(processor, slots) for processor in self.sampler.logits_processors)
            or (thinking.enabled and thinking.use_thinking_budget[slots].any())
        )

    def _walk_at_once(self, rows: _Rows, step: StepTrees) -> tuple[Walk, Tensor | None]:
        """As `_walk_by_depth`."""
        batch, shown = step.batch, self._shown(step)
        sampled, processed = self.sampler.sample(
            *(rows.logits, batch.expanded_idx_mapping, batch.idx_mapping, batch.idx_mapping_np),
            *(rows.positions, rows.tokens, batch.expanded_local_pos, rows.lengths),
            return_logprobs=shown,
        )
        walk = greedy_walk(
            step.rows_of(sampled.to(torch.int64), -1),
            step.rows_of(rows.tokens, -1)[:, 1:],
            step.parents,
            step.num_nodes,
            max_depth=self.trees.depth_of(step),
        )
        return walk, _on_path(processed, step, walk) if shown else None

    def _walk_by_depth(self, rows: _Rows, step: StepTrees) -> tuple[Walk, Tensor | None]:
        """The walk, and processed logits [R * (D + 1), V] of its rows where the host is to show them."""
        node_tokens = step.rows_of(rows.tokens, -1)[:, 1:]
        standing = torch.zeros_like(step.num_nodes)
        reads_history = self._reads_history(step.batch.idx_mapping_np)
        shown = self._shown(step)
        path: list[Tensor] = []
        emitted: list[Tensor] = []
        processed: list[Tensor | None] = []
        for depth in range(1 + self.trees.depth_of(step)):
            if depth:
                standing = step_to_child(standing, emitted[-1], node_tokens, step.parents, step.num_nodes)
            path.append(standing)
            below = path if reads_history else path[-1:]
            sampled, logits = self._draw(rows, step, torch.stack(below, dim=1), depth, shown)
            emitted.append(sampled.where(standing >= 0, -1))
            processed.append(logits)
        walked = torch.stack(path, dim=1)
        walk = Walk(walked, torch.stack(emitted, dim=1), (walked >= 0).sum(dim=1))
        return walk, torch.stack(processed, dim=1).flatten(0, 1) if shown else None  # type: ignore[arg-type]

    def _draw(
        self, rows: _Rows, step: StepTrees, path: Tensor, depth: int, shown: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Sample at the ends of paths.

        The host's processors find a row's history in the rows before it. So each request is a segment of its own here:
        the rows of its path, and what is sampled at the last of them counts.

        Args:
            rows: the step's rows of logits.
            step: the step's trees.
            path: int64 [R, d], rows from the root on or the last one alone; -1 where a walk has ended (a token is
                drawn there too, after roots in place of what is missing, and nobody reads it).
            depth: of the last row.
            shown: whether processed logits are wanted.

        Returns:
            Tokens int64 [R] and, if wanted, logits [R, V].
        """
        batch, count, length = step.batch, *path.shape
        places = (step.first_logit[:, None] + path.clamp(min=0)).flatten()
        local = torch.arange(length, dtype=torch.int32, device=places.device)
        positions = (step.context[:, None] + (depth + 1 - length) + local).flatten()
        local = local.repeat(count)
        slots = batch.idx_mapping.repeat_interleave(length)
        most = max(1, get_max_chunk_logits(rows.logits.shape[1]) // length)  # requests in a part
        tokens, logits = [], []
        for first in range(0, count, most):
            requests, part = slice(first, first + most), slice(first * length, (first + most) * length)
            at = places[part]
            sampled, processed = self.sampler.sample(
                rows.logits[at],
                slots[part],
                batch.idx_mapping[requests],
                batch.idx_mapping_np[requests],
                positions[part],
                rows.tokens[at],
                local[part],
                rows.lengths[requests],
                return_logprobs=shown,
            )
            tokens.append(sampled[length - 1 :: length].to(torch.int64))
            logits.append(processed[length - 1 :: length] if shown else None)
        return torch.cat(tokens), torch.cat(logits) if shown else None  # type: ignore[arg-type]

    def _shown(self, step: StepTrees) -> bool:
        """Whether logits are shown as processors leave them."""
        return self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES and self._wanted(step) is not None

    def _wanted(self, step: StepTrees) -> tuple[int, int] | None:
        """How many log-probabilities, and of how many named tokens, a request wants at most; None: nobody wants any."""
        return self.sampler.get_logprobs_dims(step.batch.idx_mapping_np)

    def _logprobs(
        self, logits: Tensor, processed: Tensor | None, step: StepTrees, walk: Walk
    ) -> LogprobsTensors | None:
        """Log-probabilities of the rows of each walk, D + 1 for every request; the host reads the first of them."""
        wanted = self._wanted(step)
        if wanted is None:
            return None
        batch, (count, length) = step.batch, walk.rows.shape
        return compute_topk_scores(
            _on_path(logits, step, walk) if processed is None else processed,
            wanted[0],
            walk.tokens.clamp(min=0).flatten(),
            list(range(0, (count + 1) * length, length)),
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=batch.idx_mapping.repeat_interleave(length),
            max_per_req_token_ids=wanted[1],
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )


def _on_path(logits: Tensor, step: StepTrees, walk: Walk) -> Tensor:
    """[R * (D + 1), V], the rows of logits [L, V] on each walk; the root's where a walk has ended."""
    return logits[(step.first_logit[:, None] + walk.rows.clamp(min=0)).flatten()]


def _reads_history(processor: Any, slots: npt.NDArray[np.intp]) -> bool:
    if isinstance(processor, LogitBiasState):  # min_tokens too: it reads positions alone
        return False
    if isinstance(processor, PenaltiesState):
        return bool(processor.use_penalty[slots].any())
    if isinstance(processor, BadWordsState):
        return bool((processor.num_bad_words.np[slots] > 0).any())
    return True  # a user's own
