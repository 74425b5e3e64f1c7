"""What the target itself would have said at every stored row: its likeliest tokens, kept on disk, memory-mapped.

The row that produced a token holds the target's whole distribution there: its own head's, with bias, soft cap and scale
where it has them (`Target.logits`). So a head that
looks k + 1 tokens ahead can learn from the distribution k + 1 rows further on (knowledge distillation, Hinton et al.
2015, arXiv:1503.02531), at the price of one product per row, once, whatever the number of heads and epochs.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_medusa.heads.target import Target
from vllm_medusa.training.hidden import HiddenRows, release
from vllm_medusa.training.ranks import Ranks

TOP = 16
_BATCH = 512
_RELEASE = 16  # batches after which mapped pages of the store are given back


@dataclass(frozen=True)
class Teacher:
    """The target's distribution over the draft vocabulary at n rows, its likeliest tokens only.

    Attributes:
        tokens: int32 [n, S], indices into the draft vocabulary, likeliest first.
        shares: float16 [n, S], their probabilities; they sum to a little less than 1.
    """

    tokens: npt.NDArray[np.int32]
    shares: npt.NDArray[np.float16]

    def release(self) -> None:
        """Give mapped pages back (see hidden.py)."""
        release(self.tokens)
        release(self.shares)


def make_teacher(
    target: Target,
    token_map: Tensor | None,
    rows: HiddenRows,
    folder: Path,
    on_progress: Callable[[int, int], None] = lambda done, rows: None,
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
) -> Teacher:
    """Ask the target for its distribution at every row, or find in `folder` what was asked before.

    Two files named after the rows and the draft vocabulary; each is complete or absent, a killed run starts again.

    Args:
        target: the target's own head.
        token_map: int64 [Vd], the draft vocabulary; None: all V.
        rows: n rows of this target.
        folder: where the two files lie.
        on_progress: told the rows done and all rows.
        ranks: the processes that share the work; all of them ask.
    """
    target = target.outputs(token_map)
    top = min(TOP, len(target.unembedding))
    folder.mkdir(parents=True, exist_ok=True)
    named = folder / f"teacher-{_fingerprint(target, token_map, rows, top)}"
    files = [named.with_suffix(suffix) for suffix in (".tokens", ".shares")]
    if not all(file.exists() for file in files):
        partial = [file.with_name(file.name + ".partial") for file in files]
        if ranks.is_first:
            for source, width in zip(partial, (4, 2), strict=True):
                with source.open("wb") as made:
                    made.truncate(len(rows) * top * width)
        ranks.wait()
        _write(target, rows, top, partial, on_progress, ranks)
        ranks.wait()
        if ranks.is_first:
            for source, file in zip(partial, files, strict=True):
                os.replace(source, file)
    ranks.wait()
    shape = (len(rows), top)
    return Teacher(
        np.memmap(files[0], dtype=np.int32, mode="r", shape=shape),
        np.memmap(files[1], dtype=np.float16, mode="r", shape=shape),
    )


@torch.inference_mode()
def _write(
    target: Target,
    rows: HiddenRows,
    top: int,
    files: list[Path],
    on_progress: Callable[[int, int], None],
    ranks: Ranks,
) -> None:
    """Fill in two files that are there: every so many batches are this process's."""
    with files[0].open("r+b") as tokens, files[1].open("r+b") as shares:
        for number, first in enumerate(range(0, len(rows), _BATCH)):
            if number % ranks.count != ranks.number:
                continue
            where = np.arange(first, min(first + _BATCH, len(rows)))
            logits = target.logits(rows.gather(where))
            best = logits.topk(top, dim=-1)
            probabilities = (best.values - logits.logsumexp(-1, keepdim=True)).exp()
            tokens.seek(first * top * 4)
            tokens.write(best.indices.to("cpu", torch.int32).numpy().tobytes())
            shares.seek(first * top * 2)
            shares.write(probabilities.to("cpu", torch.float16).numpy().tobytes())
            on_progress(int(where[-1]) + 1, len(rows))
            if number % _RELEASE == 0:
                rows.release()


def _fingerprint(target: Target, token_map: Tensor | None, rows: HiddenRows, top: int) -> str:
    digest = hashlib.sha256(f"{top} {len(rows)} {len(target.unembedding)} {target.rule}".encode())
    digest.update(np.ascontiguousarray(rows.tokens).data)
    for part in (token_map, None if target.bias is None else target.bias.float()):
        if part is not None:
            digest.update(part.cpu().numpy().data)
    return digest.hexdigest()[:16]
