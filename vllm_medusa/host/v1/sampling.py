"""The walk on Model Runner V1: the host's own Sampler draws at each depth, and the walk follows the drawn child."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_medusa.host.trees import StepTrees
from vllm_medusa.host.v1.emission import Ends
from vllm_medusa.host.v1.logprobs import Wanted, in_path_order
from vllm_medusa.host.v1.proposals import DrawnChildren, ProposalSampler
from vllm_medusa.tree import native
from vllm_medusa.tree.walk import Walk

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Draw = Callable[[Ints, Ints, Bools], tuple[Tensor, LogprobsTensors | None]]


@dataclass(frozen=True)
class StepRows:
    """What the walk of one step needs besides logits.

    Attributes:
        trees: the step's trees.
        histories: R lists, the tokens each request has emitted (the host's own lists; the walk lengthens them while
            it lasts).
        unfinished: bool [R], requests whose prompt is not computed to its end: the host discards what they sample.
        ends: where requests end; what a walk draws behind that is dropped by the host, and takes no generator's draws.
    """

    trees: StepTrees
    histories: Sequence[list[int]]
    unfinished: Bools
    ends: Ends = field(default_factory=Ends)


class TreeSampler:
    """Stands where the host has its rejection sampler.

    A walk is plain decoding with the forward pass already done: at each depth the row of the node on which a request
    stands goes through the host's Sampler, with the tokens walked so far in the request's history, and the request
    moves to the child that carries the drawn token. So every emitted token is a draw from the target's own
    distribution, and a seeded request takes exactly one draw of its generator per emitted token. Seen as rejection
    sampling, the proposals are one-hot: child c is accepted with probability p(c), else the token comes from the rest
    (Leviathan et al., arXiv:2211.17192, with q one-hot; for several children SpecInfer, arXiv:2305.09781). Drafts
    that were drawn (`draft_sample_method: "probabilistic"`) are judged by their proposals instead: same distribution,
    other draws than plain decoding takes from a seed.
    """

    def __init__(self, sampler: Sampler) -> None:
        """Walk with the host's `sampler`."""
        self.sampler = sampler
        self.last_stage: ProposalSampler | None = None
        self.rows: StepRows | None = None
        self.walk: Walk | None = None

    def judge_proposals(self) -> None:
        """From now on, candidates that were drawn from the heads' distributions are judged by these."""
        self.last_stage = ProposalSampler(self.sampler.topk_topp_sampler)
        self.sampler.topk_topp_sampler = self.last_stage

    def __call__(
        self, metadata: SpecDecodeMetadata, draft_probs: Tensor | None, logits: Tensor, sampling: SamplingMetadata
    ) -> SamplerOutput:
        """Walk the trees set in `rows`.

        Args:
            metadata: the host's view of the drafts (rows of logits per request).
            draft_probs: unused; what drafts were drawn from travels with the trees.
            logits: [sum of 1 + nodes, V], row by row; grammar masks are applied.
            sampling: the host's parameters of the batch.

        Returns:
            Emitted tokens int32 [R, longest], padded with -1, and log-probabilities in the same order.
        """
        rows, self.rows = self.rows, None
        if rows is None:  # the host's own dry runs, before any request
            return self.sampler(logits[: len(metadata.num_draft_tokens)], sampling)
        trees, first, wanted = rows.trees, rows.trees.first_logit, Wanted.of(sampling)
        bare = sampling.all_greedy and _only_asks_for_tokens(sampling)
        if bare:
            found = native.greedy_walk(logits, first, ~rows.unfinished, trees.tokens, trees.parents, trees.sizes)
            if found is not None:
                self.walk = Walk(*map(torch.from_numpy, found))
                return SamplerOutput(sampled_token_ids=self.walk.tokens.to(torch.int32), logprobs_tensors=None)

        def draw(asked: Ints, standing: Ints, drawing: Bools) -> tuple[Tensor, LogprobsTensors | None]:
            at = torch.from_numpy(first[asked] + np.maximum(standing[asked], 0)).to(logits.device)
            if self.last_stage is not None:
                self.last_stage.drawn = DrawnChildren.find(trees, asked, standing, logits.shape[1])
            if bare:  # nothing but the argmax; the host's own, so that ties fall alike
                return Sampler.greedy_sample(logits[at].to(torch.float32)), None
            plain = wanted.ask(_as_plain(sampling, torch.from_numpy(asked), drawing))
            if standing.any():  # requests with a thinking budget have no drafts: they are asked at roots alone
                plain = replace(plain, thinking_budget_state_holder=None)
            output = self.sampler(logits[at], plain)
            tokens = output.sampled_token_ids[:, 0]
            return tokens, wanted.pick(output.logprobs_tensors, tokens, asked, len(drawing))

        skip_ended = _rows_are_separable(sampling)
        histories = None if bare else _Histories(rows.histories, sampling.logitsprocs, rows.ends)
        self.walk, logprobs = _walk(rows, draw, histories, skip_ended=skip_ended)
        tokens = self.walk.tokens.to(logits.device, torch.int32)
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)


def _walk(
    rows: StepRows, draw: Draw, histories: _Histories | None, *, skip_ended: bool
) -> tuple[Walk, LogprobsTensors | None]:
    """Walk all trees of a step, one depth at a time; rows that are not reached cost nothing.

    Args:
        rows: the step.
        draw: from (requests asked int64 [A], every request's row int64 [R], bool [R] who may use its generator) to
            (tokens [A], log-probabilities of the batch).
        histories: told of every token walked; None if nothing reads them.
        skip_ended: ask only for requests that still walk; else for the whole batch, in its order, at each depth.
    """
    trees, walking = rows.trees, ~rows.unfinished
    standing = np.zeros(len(trees.requests), dtype=np.int64)
    everyone = np.arange(len(standing))
    path, emitted, logprobs = [], [], []
    try:
        while True:
            path.append(standing)
            active = standing >= 0
            asked = np.flatnonzero(active) if skip_ended else everyone
            drawing = active & walking if histories is None else active & walking & ~histories.ended
            drawn, information = draw(asked, standing, drawing)
            sampled = np.full_like(standing, -1)
            sampled[asked] = drawn.cpu().numpy()
            emitted.append(np.where(active, sampled, -1))
            logprobs.append(information)
            standing = np.where(walking, trees.children(standing, sampled), -1)
            if not (standing >= 0).any():
                break
            if histories is not None:
                histories.grow(sampled.tolist(), standing >= 0)
    finally:
        if histories is not None:
            histories.restore()
    walked, tokens = np.stack(path, axis=1), np.stack(emitted, axis=1)
    lengths = (walked >= 0).sum(axis=1)
    return Walk(*map(torch.from_numpy, (walked, tokens, lengths))), in_path_order(logprobs)


def _rows_are_separable(sampling: SamplingMetadata) -> bool:
    """Whether a part of the batch can be sampled without the rest: no processor keeps state by row of the batch."""
    return all(_is_idle(processor) for processor in sampling.logitsprocs.all)


def _only_asks_for_tokens(sampling: SamplingMetadata) -> bool:
    """Whether logits go into the choice of a token as they are, and nothing else is asked."""
    holder = sampling.thinking_budget_state_holder
    return (
        sampling.no_penalties
        and sampling.max_num_logprobs is None
        and not sampling.logprob_token_ids
        and not sampling.bad_words_token_ids
        and sampling.allowed_token_ids_mask is None
        and (holder is None or not holder.has_tracked_requests())
        and _rows_are_separable(sampling)
    )


def _is_idle(processor: Any) -> bool:
    if isinstance(processor, MinTokensLogitsProcessor):
        return not processor.min_toks
    if isinstance(processor, LogitBiasLogitsProcessor):
        return not processor.biases
    if isinstance(processor, MinPLogitsProcessor):
        return not processor.min_p_count
    if isinstance(processor, AdapterLogitsProcessor):
        return not processor.req_info
    return False


def _as_plain(sampling: SamplingMetadata, asked: Tensor, drawing: Bools) -> SamplingMetadata:
    """Parameters of the rows `asked`, as in plain decoding; only rows that are `drawing` take from their generators."""
    rows = asked.tolist()
    generators = {
        place: sampling.generators[row] for place, row in enumerate(rows) if row in sampling.generators and drawing[row]
    }
    if len(rows) == len(drawing):
        return replace(sampling, generators=generators, spec_token_ids=None)

    def part(values: Tensor | None) -> Tensor | None:
        return values if values is None or not len(values) else values[asked.to(values.device)]

    def entries(by_row: dict[int, Any] | None) -> Any:
        return by_row and {place: by_row[row] for place, row in enumerate(rows) if row in by_row}

    return replace(
        sampling,
        generators=generators,
        spec_token_ids=None,
        temperature=part(sampling.temperature),
        top_p=part(sampling.top_p),
        top_k=part(sampling.top_k),
        prompt_token_ids=part(sampling.prompt_token_ids),
        frequency_penalties=part(sampling.frequency_penalties),
        presence_penalties=part(sampling.presence_penalties),
        repetition_penalties=part(sampling.repetition_penalties),
        allowed_token_ids_mask=part(sampling.allowed_token_ids_mask),
        output_token_ids=[sampling.output_token_ids[row] for row in rows] if sampling.output_token_ids else [],
        bad_words_token_ids=entries(sampling.bad_words_token_ids),
        logprob_token_ids=entries(sampling.logprob_token_ids),
    )


class _Histories:
    """The requests' emitted tokens, lengthened while a walk lasts; the host appends the tokens itself afterwards.

    Penalties, bad words and min_tokens read these lists, and so do the rules by which requests end. A processor that
    drops a request because its history has become long enough (min_tokens) stays right afterwards, since every token of
    the walk is emitted.

    Attributes:
        ended: bool [R], requests that have ended where their path goes on.
    """

    def __init__(self, histories: Sequence[list[int]], processors: LogitsProcessors, ends: Ends) -> None:
        self._histories, self._processors, self._ends = histories, processors, ends
        self._lengths = [len(history) for history in histories]
        self._adapters = {p: p.req_info for p in processors.all if isinstance(p, AdapterLogitsProcessor) and p.req_info}
        self.ended = np.zeros(len(histories), dtype=np.bool_)

    def grow(self, tokens: Sequence[int], moved: Bools) -> None:
        """Append their tokens to the histories of requests that moved, and tell the processors."""
        for row in np.flatnonzero(moved).tolist():
            self._histories[row].append(tokens[row])
            self.ended[row] |= self._ends(row)
        for processor in self._processors.all:
            processor.update_state(None)
        for adapter, by_row in self._adapters.items():  # a request's own function is called once per emitted token
            adapter.req_info = {row: function for row, function in by_row.items() if moved[row]}

    def restore(self) -> None:
        """Take back everything that was appended."""
        for adapter, by_row in self._adapters.items():
            adapter.req_info = by_row
        for history, length in zip(self._histories, self._lengths, strict=True):
            del history[length:]
