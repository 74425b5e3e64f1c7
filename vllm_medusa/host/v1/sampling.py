"""The walk on Model Runner V1: the host's own Sampler draws at each depth, and the walk follows the drawn child."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_medusa.host.trees import StepTrees
from vllm_medusa.tree.walk import Walk, greedy_walk, step_to_child

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class StepRows:
    """What the walk of one step needs besides logits.

    Attributes:
        trees: the step's trees.
        histories: R lists, the tokens each request has emitted (the host's own lists; the walk lengthens them while
            it lasts).
        unfinished: bool [R], requests whose prompt is not computed to its end: the host discards what they sample.
    """

    trees: StepTrees
    histories: Sequence[list[int]]
    unfinished: Bools


class TreeSampler:
    """Stands where the host has its rejection sampler.

    A walk is plain decoding with the forward pass already done: at each depth the row of the node on which a request
    stands goes through the host's Sampler, with the tokens walked so far in the request's history, and the request
    moves to the child that carries the drawn token. So every emitted token is a draw from the target's own
    distribution, and a seeded request takes exactly one draw of its generator per emitted token. Seen as rejection
    sampling, the proposals are one-hot: child c is accepted with probability p(c), else the token comes from the rest
    (Leviathan et al., arXiv:2211.17192, with q one-hot; for several children SpecInfer, arXiv:2305.09781).
    """

    def __init__(self, sampler: Sampler) -> None:
        """Walk with the host's `sampler`."""
        self.sampler = sampler
        self.rows: StepRows | None = None
        self.walk: Walk | None = None

    def __call__(
        self, metadata: SpecDecodeMetadata, draft_probs: Tensor | None, logits: Tensor, sampling: SamplingMetadata
    ) -> SamplerOutput:
        """Walk the trees set in `rows`.

        Args:
            metadata: the host's view of the drafts (rows of logits per request).
            draft_probs: unused; our drafts are one-hot.
            logits: [sum of 1 + nodes, V], row by row; grammar masks are applied.
            sampling: the host's parameters of the batch.

        Returns:
            Emitted tokens int32 [R, longest], padded with -1, and log-probabilities in the same order.
        """
        rows, self.rows = self.rows, None
        if rows is None:  # the host's own dry runs, before any request
            return self.sampler(logits[: len(metadata.num_draft_tokens)], sampling)
        if _is_plainly_greedy(sampling):
            self.walk = _walk_greedily(rows.trees, logits)
            return SamplerOutput(sampled_token_ids=self.walk.tokens.to(torch.int32), logprobs_tensors=None)
        self.walk, logprobs = self._walk_by_sampling(rows, logits, sampling)
        return SamplerOutput(sampled_token_ids=self.walk.tokens.to(torch.int32), logprobs_tensors=logprobs)

    def _walk_by_sampling(
        self, rows: StepRows, logits: Tensor, sampling: SamplingMetadata
    ) -> tuple[Walk, LogprobsTensors | None]:
        trees = rows.trees
        tree = (torch.from_numpy(trees.tokens), torch.from_numpy(trees.parents), torch.from_numpy(trees.sizes))
        first = torch.from_numpy(trees.first_logit)
        standing = torch.zeros(len(trees.requests), dtype=torch.int64)
        walking = torch.from_numpy(~rows.unfinished)
        path, emitted, logprobs = [], [], []
        with _growing(rows.histories, sampling.logitsprocs) as grow:
            while True:
                path.append(standing)
                active = standing >= 0
                drawing = (active & walking).numpy()
                output = self.sampler(logits[first + standing.clamp(min=0)], _as_plain(sampling, drawing))
                sampled = output.sampled_token_ids[:, 0].to(torch.int64)
                emitted.append(sampled.where(active, -1))
                logprobs.append(output.logprobs_tensors)
                standing = step_to_child(standing, sampled, *tree)
                standing = standing.where(walking, -1)
                if not bool((standing >= 0).any()):
                    break
                grow(sampled.tolist(), (standing >= 0).tolist())
        rows_walked = torch.stack(path, dim=1)
        walk = Walk(rows_walked, torch.stack(emitted, dim=1), (rows_walked >= 0).sum(dim=1))
        return walk, _in_path_order(logprobs)


def _is_plainly_greedy(sampling: SamplingMetadata) -> bool:
    """Whether every row's token is the argmax of its logits and nothing else is asked for."""
    holder = sampling.thinking_budget_state_holder
    return (
        sampling.all_greedy
        and sampling.no_penalties
        and sampling.max_num_logprobs is None
        and not sampling.logprob_token_ids
        and not sampling.bad_words_token_ids
        and sampling.allowed_token_ids_mask is None
        and all(_is_idle(processor) for processor in sampling.logitsprocs.non_argmax_invariant)
        and (holder is None or not holder.has_tracked_requests())
    )


def _is_idle(processor: Any) -> bool:
    if isinstance(processor, MinTokensLogitsProcessor):
        return not processor.min_toks
    if isinstance(processor, LogitBiasLogitsProcessor):
        return not processor.biases
    return False


def _walk_greedily(trees: StepTrees, logits: Tensor) -> Walk:
    """One argmax over all rows, by the host's own function so that ties fall as in plain decoding."""
    best = Sampler.greedy_sample(logits.to(torch.float32)).to(torch.int64)
    width = trees.tokens.shape[1]
    index = torch.from_numpy(trees.first_logit)[:, None] + torch.arange(width + 1)
    target = best[index.clamp(max=len(best) - 1)]  # rows beyond a request's nodes are never walked
    return greedy_walk(
        target, torch.from_numpy(trees.tokens), torch.from_numpy(trees.parents), torch.from_numpy(trees.sizes)
    )


def _as_plain(sampling: SamplingMetadata, drawing: Bools) -> SamplingMetadata:
    """The batch's parameters as in plain decoding; only rows that are `drawing` may take from their generators."""
    generators = {row: generator for row, generator in sampling.generators.items() if drawing[row]}
    return replace(sampling, generators=generators, spec_token_ids=None)


@contextmanager
def _growing(histories: Sequence[list[int]], processors: LogitsProcessors) -> Iterator[Any]:
    """Lengthen the requests' histories while a walk lasts; the host appends the emitted tokens itself afterwards.

    Penalties, bad words and min_tokens read these lists. A processor that drops a request because its history has
    become long enough (min_tokens) stays right afterwards, since every token of the walk is emitted.
    """
    lengths = [len(history) for history in histories]

    def grow(tokens: Sequence[int], moved: Sequence[bool]) -> None:
        for history, token, has_moved in zip(histories, tokens, moved, strict=True):
            if has_moved:
                history.append(token)
        for processor in processors.all:
            processor.update_state(None)

    try:
        yield grow
    finally:
        for history, length in zip(histories, lengths, strict=True):
            del history[length:]


def _in_path_order(by_depth: Sequence[LogprobsTensors | None]) -> LogprobsTensors | None:
    """Log-probabilities [R, ...] of each depth as the host wants them: [R * depths, ...], request by request."""
    present = [tensors for tensors in by_depth if tensors is not None]
    if not present:
        return None
    return LogprobsTensors(
        *(
            torch.stack([getattr(tensors, name) for tensors in present], dim=1).flatten(0, 1)
            for name in ("logprob_token_ids", "logprobs", "selected_token_ranks")
        )
    )
