"""Log-probabilities of a walk on Model Runner V1: as wide at each depth, each request's as it asked for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

Ints = npt.NDArray[np.int64]
_FIELDS = ("logprob_token_ids", "logprobs", "selected_token_ranks")


@dataclass(frozen=True)
class Wanted:
    """What the requests of one step want to know beside their tokens.

    The host's Sampler shows the likeliest tokens, or named ones (`logprob_token_ids`) to the whole batch as soon as one
    request names some, as many as the longest list of those that are asked. During a walk these are others at each
    depth. So where tokens are named, the Sampler is asked for all of them and each request's are picked here, with the
    Sampler's own functions.

    Attributes:
        most: the most likeliest tokens that a request wants; None: nobody wants any.
        named: token ids by row of the batch.
    """

    most: int | None
    named: dict[int, list[int]]

    @classmethod
    def of(cls, sampling: SamplingMetadata) -> Wanted:
        """What the host's parameters of a batch say."""
        return cls(sampling.max_num_logprobs, sampling.logprob_token_ids or {})

    @property
    def columns(self) -> int:
        """C, tokens shown at each place: the one that was drawn and the most that a request wants beside it."""
        return 1 + max(self.most or 0, *map(len, self.named.values()), 0)

    def ask(self, sampling: SamplingMetadata) -> SamplingMetadata:
        """Have the Sampler show what `pick` picks from."""
        return replace(sampling, max_num_logprobs=-1, logprob_token_ids=None) if self.named else sampling

    def pick(self, shown: LogprobsTensors | None, drawn: Tensor, asked: Ints, batch: int) -> LogprobsTensors | None:
        """Log-probabilities of the rows that were asked, in their places among all rows of the batch.

        Args:
            shown: what the Sampler showed for the A asked rows, asked as `ask` says.
            drawn: int [A], their tokens.
            asked: int64 [A], rows of the batch.
            batch: R, its rows. Those that were not asked are never read.

        Returns:
            [R, C] twice and [R]; where a request wants fewer than others, token 0 with -inf fills up, as the host does.
        """
        if shown is None:
            return None
        picked = self._pick(shown.logprobs, drawn.to(torch.int64), asked) if self.named else shown
        return _for_the_batch(picked, torch.from_numpy(asked), batch)

    def _pick(self, all_tokens: Tensor, drawn: Tensor, asked: Ints) -> LogprobsTensors:
        """From the log-probabilities of all tokens [A, V]."""
        ids = torch.zeros(len(asked), self.columns, dtype=torch.int32, device=all_tokens.device)
        values = torch.full(ids.shape, float("-inf"), device=all_tokens.device)
        likeliest = Sampler.gather_logprobs(all_tokens, self.most or 0, drawn)
        width = likeliest.logprobs.shape[1]
        ids[:, :width], values[:, :width] = likeliest.logprob_token_ids, likeliest.logprobs
        for place, row in enumerate(asked.tolist()):
            if (named := self.named.get(row)) is None:
                continue
            tokens = torch.tensor(named, dtype=torch.int64, device=ids.device)
            ids[place, 1:], values[place, 1:] = 0, float("-inf")
            ids[place, 1 : 1 + len(named)] = tokens.to(torch.int32)
            values[place, 1 : 1 + len(named)] = all_tokens[place, tokens]
        return LogprobsTensors(ids, values, likeliest.selected_token_ranks)


def in_path_order(by_depth: Sequence[LogprobsTensors | None]) -> LogprobsTensors | None:
    """Log-probabilities [R, ...] of each depth as the host wants them: [R * depths, ...], request by request."""
    present = [tensors for tensors in by_depth if tensors is not None]
    if not present:
        return None
    assert len(present) == len(by_depth)

    def together(name: str) -> Any:
        return torch.stack([getattr(tensors, name) for tensors in present], dim=1).flatten(0, 1)

    return LogprobsTensors(*map(together, _FIELDS))


def _for_the_batch(information: LogprobsTensors, asked: Tensor, batch: int) -> LogprobsTensors:
    """Log-probabilities of the rows `asked` in their places among `batch` rows; the other rows are never read."""
    if len(asked) == batch:
        return information

    def spread(values: Tensor) -> Tensor:
        zeros = values.new_zeros(batch, *values.shape[1:])
        return zeros.index_copy(0, asked.to(values.device), values)

    return LogprobsTensors(*(spread(getattr(information, name)) for name in _FIELDS))
