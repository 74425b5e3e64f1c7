"""A target whose matrices one process does not hold plain and whole: in parts on several ranks, or quantized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from vllm_medusa.heads.products import largest, product


@dataclass(frozen=True)
class TargetPart:
    """What one rank of a target knows of the two matrices that heads share.

    Attributes:
        vocab_size: V, tokens of the whole target.
        hidden_size: H.
        dtype: of hidden rows.
        device: of everything.
        first: token of the first row of the unembedding that is here.
        rows: how many rows are here: tokens `first` to `first + rows`. Ranks follow one another.
        weight: [rows, H], these rows; None where they are quantized and only `multiply` knows them.
        multiply: hidden rows [N, H] to their logits [N, rows].
        embed: tokens int64 [B] to their embeddings [B, H], the same on every rank.
        gather: a tensor of one shape on all ranks to all of them, [ranks, ...], the same on every rank.
    """

    vocab_size: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    first: int
    rows: int
    weight: Tensor | None
    multiply: Callable[[Tensor], Tensor]
    embed: Callable[[Tensor], Tensor]
    gather: Callable[[Tensor], Tensor]


class SharedOutputs:
    """What heads say through a target's unembedding of which this rank has a part: the same on every rank.

    One rank alone, which holds everything:

    >>> table = torch.eye(6, 4)
    >>> part = TargetPart(
    ...     vocab_size=6, hidden_size=4, dtype=table.dtype, device=table.device, first=0, rows=6, weight=table,
    ...     multiply=lambda states: states @ table.T, embed=lambda tokens: table[tokens], gather=lambda here: here[None]
    ... )
    >>> state = torch.tensor([[[0.0, 5.0, 1.0, 2.0]]])
    >>> places, probabilities = SharedOutputs(part, None, 6).best(state, torch.ones(1), 2)
    >>> places.tolist()
    [[[1, 3]]]
    """

    def __init__(self, part: TargetPart, token_map: Tensor | None, outputs: int) -> None:
        """Find what is here.

        Args:
            part: this rank's.
            token_map: int64 [Vd], the draft vocabulary's tokens; None: it is the first `outputs` tokens.
            outputs: Vd.
        """
        self._part = part
        if token_map is None:
            token_map = torch.arange(outputs, device=part.device)
        here = (token_map >= part.first) & (token_map < part.first + part.rows)
        self._places = here.nonzero().flatten()  # int64 [n], which of the Vd outputs are here
        columns = token_map[here] - part.first
        every = len(columns) == part.rows and bool((columns == torch.arange(part.rows, device=part.device)).all())
        self._columns = None if every else columns
        self._weight = part.weight if part.weight is None or every else part.weight[columns]
        counts = part.gather(torch.tensor([len(columns)], device=part.device)).flatten()
        self._most = int(counts.max())  # so that ranks can gather their logits
        padded = torch.full((self._most,), -1, dtype=torch.int64, device=part.device)
        padded[: len(columns)] = self._places
        everywhere = part.gather(padded).flatten()
        # Where among all ranks' logits, of as many for each rank, an output lies: looked up once, for that waits.
        self._at = (everywhere >= 0).nonzero().flatten()[everywhere[everywhere >= 0].argsort()]

    def best(self, states: Tensor, scale: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k likeliest outputs of every head; of two that are as likely, the first.

        Every rank looks in its own part; what they found is gathered and searched again.

        Args:
            states: [B, K, H], each head's row before the unembedding.
            scale: float32 [1, K, 1], of its logits.
            k: at most Vd.

        Returns:
            Places int64 [B, K, k], best first, and their probabilities float32 [B, K, k].
        """
        scaled = self._here(states).to(torch.float32) * scale
        count = min(k, len(self._places))
        values, at = largest(scaled, count)
        # In one tensor, so that ranks talk once: float64 holds float32 values and places exactly.
        told = torch.full((*scaled.shape[:2], 2 * k + 1), -torch.inf, dtype=torch.float64, device=scaled.device)
        told[..., :count] = values
        told[..., k : k + count] = self._places[at]
        told[..., 2 * k] = scaled.logsumexp(-1)
        everyone = self._part.gather(told)
        found, places = (everyone[..., start : start + k].movedim(0, -2).flatten(-2) for start in (0, k))
        order = places.argsort(dim=-1, stable=True)
        found, places = found.gather(-1, order), places.gather(-1, order)
        best = found.sort(dim=-1, descending=True, stable=True)
        total = everyone[..., 2 * k].logsumexp(0)
        probabilities = (best.values[..., :k] - total[..., None]).exp().to(torch.float32)
        return places.gather(-1, best.indices[..., :k]).to(torch.int64), probabilities

    def logits(self, states: Tensor) -> Tensor:
        """Logits [B, K, Vd] of all outputs from states [B, K, H]; only drawing candidates needs them all."""
        here = self._here(states)
        gathered = self._part.gather(functional.pad(here, (0, self._most - here.shape[-1])))
        return gathered.movedim(0, -2).flatten(-2)[..., self._at]

    def _here(self, states: Tensor) -> Tensor:
        """Logits [B, K, n] of the outputs that are here."""
        rows = states.flatten(0, 1)
        if self._weight is not None:
            found = product(rows, self._weight)
        else:
            found = self._part.multiply(rows)
            found = found if self._columns is None else found[:, self._columns]
        return found.reshape(*states.shape[:2], -1)
