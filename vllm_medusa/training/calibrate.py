"""Calibration: how often each candidate of each head is right, and temperatures that make probabilities honest.

Dynamic trees multiply probabilities of different heads and depths, so these must mean what they say: of all candidates
given 0.3, three in ten are the token the target says. One temperature per head (Guo et al. 2017, arXiv:1706.04599) is
fitted by the likelihood of held-out answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_medusa.config import DEFAULT_NODES
from vllm_medusa.heads.config import Calibration
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.training.hidden import HiddenRows
from vllm_medusa.training.loop import draft_targets
from vllm_medusa.training.reliability import Reliability, reliability_of

BATCH = 256
# Temperatures tried at first, and how far the search goes on from there.
COARSE = tuple(np.geomspace(0.3, 4.0, 11).tolist())
STEP, LEAST, MOST = COARSE[1] / COARSE[0], 0.05, 20.0
# Temperatures are fitted on so many logits per head at most, 128 MB of them.
FIT_LOGITS = 2**25

Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Guesses:
    """What the heads guess on n rows, beside what was right.

    Attributes:
        tokens: int64 [n, K, R], candidates of each head, best first, in the target's vocabulary.
        probabilities: float32 [n, K, R].
        hits: bool [n, K, R], whether a candidate is the right token.
        known: bool [n, K], whether there is a right token: False past the answer's end.
    """

    tokens: npt.NDArray[np.int64]
    probabilities: Floats
    hits: Flags
    known: Flags


def guess(
    heads: MedusaHeads, rows: HiddenRows, top_k: int, temperatures: list[float], where: Rows | None = None
) -> Guesses:
    """Run bound heads, with these temperatures [K], over the rows `where` (all of them by default)."""
    where = np.arange(len(rows)) if where is None else where
    targets = rows.targets(heads.config.num_heads)[where]
    scale = 1.0 / torch.tensor(temperatures)[:, None]
    parts: list[tuple[Tensor, Tensor]] = []
    for first in range(0, len(where), BATCH):
        scaled = _logits(heads, rows, where[first : first + BATCH]) * scale
        best = scaled.topk(top_k, dim=-1)
        parts.append((best.indices, (best.values - scaled.logsumexp(-1, keepdim=True)).exp()))
    tokens, probabilities = (torch.cat(column).numpy() for column in zip(*parts, strict=True))
    if heads.token_map is not None:
        tokens = heads.token_map.cpu().numpy()[tokens]
    known = targets >= 0
    return Guesses(tokens, probabilities, (tokens == targets[:, :, None]) & known[:, :, None], known)


@torch.inference_mode()
def _logits(heads: MedusaHeads, rows: HiddenRows, where: Rows) -> Tensor:
    """float32 [n, K, Vd] on the CPU."""
    weight = heads.unembedding_weight()
    hidden = rows.gather(where).to(weight.device, weight.dtype)
    roots = torch.from_numpy(rows.tokens[where].astype(np.int64)).to(weight.device)
    logits: Tensor = heads(hidden, roots).float().cpu()
    return logits


def fit_temperatures(heads: MedusaHeads, rows: HiddenRows, top_k: int) -> list[float]:
    """The temperature of each head under which held-out answers are likeliest, about 0.05 to 20.

    Likelihood of what a tree is offered: one of the `top_k` candidates, or none of them (which is all the heads can say
    of a token outside their draft vocabulary). Found by a grid and a finer one around its best point, about 2 % apart.
    """
    targets = draft_targets(rows, heads)
    fitted = []
    for head in range(heads.config.num_heads):
        known = np.flatnonzero(targets[:, head] != -1)
        limit = max(FIT_LOGITS // heads.config.num_outputs, 256)
        chosen = (
            known[np.linspace(0, len(known) - 1, num=min(len(known), limit), dtype=np.int64)] if len(known) else known
        )
        if len(chosen) == 0:
            fitted.append(1.0)
            continue
        pieces = [chosen[first : first + BATCH] for first in range(0, len(chosen), BATCH)]
        logits = torch.cat([_logits(heads, rows, piece)[:, head] for piece in pieces])
        best = logits.topk(top_k, dim=-1)
        hit = best.indices == torch.from_numpy(targets[chosen, head])[:, None]
        losses = {temperature: _loss(logits, best.values, hit, temperature) for temperature in COARSE}
        at = min(losses, key=lambda temperature: losses[temperature])
        # Beyond the usual range as long as it gets better there.
        while at in (min(losses), max(losses)) and LEAST < at < MOST:
            further = at / STEP if at == min(losses) else at * STEP
            losses[further] = _loss(logits, best.values, hit, further)
            at = min(losses, key=lambda temperature: losses[temperature])
        grid = sorted(losses)
        place = grid.index(at)
        finer = np.geomspace(grid[max(place - 1, 0)], grid[min(place + 1, len(grid) - 1)], 23)
        fitted.append(round(float(min(finer, key=lambda near: _loss(logits, best.values, hit, near))), 4))
    return fitted


def _loss(logits: Tensor, best: Tensor, hit: Tensor, temperature: float) -> float:
    """Mean negative log-likelihood of "this candidate" or "none of them"."""
    offered = (best / temperature - (logits / temperature).logsumexp(-1, keepdim=True)).exp()
    none = (1.0 - offered.sum(-1)).clamp(min=1e-6)
    right = torch.where(hit.any(-1), (offered * hit).sum(-1), none)
    return float(-right.clamp(min=1e-9).log().mean())


def rank_accuracy(guesses: Guesses) -> list[list[float]]:
    """[K][R], how often candidate r of head k is right, over rows whose right token is known."""
    counts = np.maximum(guesses.known.sum(axis=0), 1)[:, None]
    return [[round(float(share), 5) for share in head] for head in guesses.hits.sum(axis=0) / counts]


def reliability(guesses: Guesses, heads: Sequence[int] | None = None) -> Reliability:
    """Said against right, over the candidates of these heads (of all by default) where the right token is known."""
    chosen = list(range(guesses.hits.shape[1]) if heads is None else heads)
    known = guesses.known[:, chosen]
    return reliability_of(guesses.probabilities[:, chosen][known].ravel(), guesses.hits[:, chosen][known].ravel())


def calibration_error(guesses: Guesses) -> list[float]:
    """Expected calibration error of each head's candidates, all ranks together, weighted by probability.

    In each bin of `reliability`, the mean probability is held against the share that was right. Weighted by
    probability: a tree spends its nodes where that is high.
    """
    return [round(reliability(guesses, [head]).error, 5) for head in range(guesses.hits.shape[1])]


def calibrate(heads: MedusaHeads, rows: HiddenRows) -> Calibration:
    """Everything the config's `calibration` holds, from held-out rows; `heads` must be bound and are not changed."""
    return measure(heads, rows).calibration


class Measured(NamedTuple):
    """A calibration and what it stands on: guesses without and with its temperatures."""

    calibration: Calibration
    before: Guesses
    after: Guesses


def measure(heads: MedusaHeads, rows: HiddenRows) -> Measured:
    """What `calibrate` does, the guesses with it."""
    top_k, neutral = heads.config.top_k, [1.0] * heads.config.num_heads
    temperatures = fit_temperatures(heads, rows, top_k)
    before, after = guess(heads, rows, top_k, neutral), guess(heads, rows, top_k, temperatures)
    calibration = Calibration(
        temperatures=temperatures,
        rank_accuracy=rank_accuracy(after),
        num_speculative_tokens=dict(DEFAULT_NODES),
        ece_before=calibration_error(before),
        ece_after=calibration_error(after),
        rows=len(rows),
    )
    return Measured(calibration, before, after)
