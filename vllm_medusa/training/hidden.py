"""Hidden rows on disk: what the target saw and said, one row per emitted token, memory-mapped.

A *store* is a folder with three files, appended together while the target generates:

    hidden.bin    bfloat16 [n, H]   the row after the final norm that produced the token
    index.bin     int32    [n, 3]   (sequence, position in the answer, token) of each row; sequence -1: dropped
    store.json    {"hidden_size": H}

Rows lie in the order of emission: a batch of requests is interleaved. Tokens may be written last (`fill_tokens`).
`HiddenRows` opens one or more stores and presents them in sequence order through a permutation, without copying the
rows.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     writer = RowWriter(Path(folder), hidden_size=2)
...     writer.append([0, 1], [0, 0], [11, 21], torch.zeros(2, 2))  # two requests, two steps
...     writer.append([0, 1], [1, 1], [12, 22], torch.ones(2, 2))
...     HiddenRows.open([Path(folder)]).tokens
array([11, 12, 21, 22], dtype=int32)
"""

import json
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_medusa.errors import MedusaError

HIDDEN, INDEX, HEADER = "hidden.bin", "index.bin", "store.json"

Rows = npt.NDArray[np.integer]


class RowWriter:
    """Appends to a store; every `append` is on disk when it returns, so a killed writer loses at most one step."""

    def __init__(self, folder: Path, hidden_size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / HEADER).write_text(json.dumps({"hidden_size": hidden_size}))
        self._hidden_size = hidden_size
        self._hidden = open(folder / HIDDEN, "wb", buffering=0)  # noqa: SIM115  (open for the writer's life)
        self._index = open(folder / INDEX, "wb", buffering=0)  # noqa: SIM115

    def append(
        self, sequences: Sequence[int], positions: Sequence[int], tokens: Sequence[int], hidden: torch.Tensor
    ) -> None:
        """Add n rows: for each, its sequence, its place in the answer, the token it produced, and hidden [n, H]."""
        index = np.array([sequences, positions, tokens], dtype=np.int32).T
        if hidden.shape != (len(index), self._hidden_size):
            raise ValueError(f"hidden rows {tuple(hidden.shape)} do not fit {len(index)} tokens")
        rows = hidden.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy()
        self._hidden.write(rows.tobytes())
        self._index.write(np.ascontiguousarray(index).tobytes())

    def close(self) -> None:
        """Close both files; the store is complete."""
        self._hidden.close()
        self._index.close()


@dataclass(frozen=True)
class HiddenRows:
    """n rows in sequence order: row i produced tokens[i], the root when the heads run on row i.

    `sequences` int32 [n] never decreases; rows of one sequence are consecutive, by position. 18 bytes of memory a row:
    hidden rows stay on disk.
    """

    sequences: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    hidden_size: int
    _stores: tuple[npt.NDArray[np.int16], ...]  # memory-mapped bfloat16 bits, each [n_s, H]
    _store_of: npt.NDArray[np.int16]  # [n]
    _row_of: npt.NDArray[np.int32]  # [n] row inside its store

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def open(cls, folders: Sequence[Path]) -> "HiddenRows":
        """Open stores as one; sequences are renumbered so that those of different stores stay apart."""
        stores, parts, first, hidden_size = [], [], 0, 0
        for number, folder in enumerate(folders):
            rows, index, hidden_size = _map_store(folder)
            order = np.lexsort((index[:, 1], index[:, 0])).astype(np.int32)
            order = order[np.count_nonzero(index[:, 0] < 0) :]
            sequence, position, token = (np.ascontiguousarray(column) for column in index[order].T)
            parts.append((sequence + np.int32(first), position, token, np.full(len(order), number, np.int16), order))
            first += int(sequence.max(initial=-1)) + 1
            stores.append(rows)
        if not parts:
            raise MedusaError.of("rows", list(folders), "there is nothing recorded to read; generate answers first")
        sequences, positions, tokens, store_of, row_of = (np.concatenate(column) for column in zip(*parts, strict=True))
        return cls(sequences, positions, tokens, hidden_size, tuple(stores), store_of, row_of)

    def first(self, sequences: int) -> "HiddenRows":
        """The rows of the first so many sequences."""
        n = int(np.searchsorted(self.sequences, sequences))
        parts = {name: getattr(self, name)[:n] for name in ("sequences", "positions", "tokens", "_store_of", "_row_of")}
        return replace(self, **parts)

    def gather(self, rows: Rows) -> torch.Tensor:
        """Hidden rows bfloat16 [len(rows), H], read from the memory-mapped stores."""
        out = np.empty((len(rows), self.hidden_size), dtype=np.int16)
        store_of = self._store_of[rows]
        for number in np.unique(store_of):
            here = store_of == number
            out[here] = self._stores[number][self._row_of[rows[here]]]
        return torch.from_numpy(out).view(torch.bfloat16)

    def release(self) -> None:
        """Give mapped pages back: they stay in the file cache, but no longer count as this process's memory."""
        for store in self._stores:
            release(store)

    def targets(self, num_heads: int) -> npt.NDArray[np.int32]:
        """Head k's target for every row, int32 [n, K]: the token k+1 places after the root; -1 past the answer's end.

        For one answer 11, 12, 13 and K = 2: [[12, 13], [13, -1], [-1, -1]].
        """
        n = len(self)
        out = np.full((n, num_heads), -1, dtype=np.int32)
        for k in range(num_heads):
            ahead = k + 1
            rows = max(n - ahead, 0)  # those with a row `ahead` further on at all
            same = self.sequences[ahead:] == self.sequences[:rows]
            out[:rows, k][same] = self.tokens[ahead:][same]
        return out


def fill_tokens(folder: Path, answers: Sequence[Sequence[int]], places: Sequence[int]) -> None:
    """Write into a store what its sequences said; rows that are no token of an answer, or are there twice, are dropped.

    Args:
        folder: the store, whose sequences get the numbers of their answers.
        answers: tokens.
        places: which of the answers is that of sequence 0, 1, …

    Raises:
        RuntimeError: a row is missing, or was written with another token: heads would learn nonsense.
    """
    index = np.fromfile(folder / INDEX, dtype=np.int32).reshape(-1, 3)
    index[:, 0] = np.array([*places, -1], dtype=np.int32)[index[:, 0]]
    lengths = np.array([len(answer) for answer in answers], dtype=np.int64)
    firsts = np.concatenate([[0], np.cumsum(lengths)])
    said = np.array([token for answer in answers for token in answer], dtype=np.int32)
    sequences, positions = index[:, 0].astype(np.int64), index[:, 1]
    kept = np.flatnonzero(sequences >= 0)
    kept = kept[positions[kept] < lengths[sequences[kept]]]
    where = firsts[sequences[kept]] + positions[kept]
    once, first = np.unique(where, return_index=True)
    kept = kept[first]
    if len(once) != len(said):
        raise RuntimeError(f"{folder} holds rows of {len(once)} of {len(said)} tokens")
    wrong = (index[kept, 2] >= 0) & (index[kept, 2] != said)
    if wrong.any():
        raise RuntimeError(f"{int(wrong.sum())} recorded rows in {folder} do not match their answers")
    index[kept, 2] = said
    dropped = np.ones(len(index), dtype=bool)
    dropped[kept] = False
    index[dropped, 0] = -1
    partial = folder / f"{INDEX}.partial"
    index.tofile(partial)
    os.replace(partial, folder / INDEX)


def release(mapped: npt.NDArray[Any]) -> None:
    """Give the pages of a memory-mapped array back; any other array is left alone."""
    mapping = getattr(mapped, "_mmap", None)
    if mapping is not None:
        mapping.madvise(mmap.MADV_DONTNEED)


def _map_store(folder: Path) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int32], int]:
    """Map one store; a torn last step (killed writer) is cut off."""
    try:
        hidden_size = int(json.loads((folder / HEADER).read_text())["hidden_size"])
        index = np.fromfile(folder / INDEX, dtype=np.int32)
        num_rows = min(len(index) // 3, (folder / HIDDEN).stat().st_size // (2 * hidden_size))
    except (OSError, ValueError, KeyError) as error:
        raise MedusaError.of("rows", str(folder), f"not a store of hidden rows ({error}); record it again") from error
    if num_rows == 0:
        return np.empty((0, hidden_size), np.int16), np.empty((0, 3), np.int32), hidden_size
    rows = np.memmap(folder / HIDDEN, dtype=np.int16, mode="r", shape=(num_rows, hidden_size))
    return rows, index[: num_rows * 3].reshape(num_rows, 3), hidden_size
