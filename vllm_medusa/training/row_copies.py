"""Rows on their way from the device where the target runs into a store, without a step that waits for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.training.hidden import RowWriter

MOST_WAITING = 64  # steps: about 64 MB of pinned memory for 64 requests of a 70B


@dataclass(frozen=True)
class _Copy:
    """Rows that are being copied."""

    sequences: list[int]
    positions: list[int]
    rows: Tensor
    buffer: Tensor
    ready: Any


class RowCopies:
    """Appends to a store.

    On a CPU at once: a step's rows are a few hundred kilobytes in the file cache. Elsewhere they are copied into pinned
    memory on a stream of their own, and a thread writes them once they are there; the step goes on. Only when the disk
    is `MOST_WAITING` steps behind is it waited for.
    """

    def __init__(self, writer: RowWriter, device: torch.device, *, in_thread: bool | None = None) -> None:
        """Start the thread where one is needed.

        Args:
            writer: of the store; closed by `close`.
            device: where rows come from.
            in_thread: None: unless that is the CPU.
        """
        self._writer, self._device = writer, torch.device(device)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._buffers: list[Tensor] = []
        self._error: BaseException | None = None
        self._queue: queue.Queue[_Copy | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        if in_thread if in_thread is not None else self._device.type != "cpu":
            self._thread = threading.Thread(target=self._write, name="medusa-rows", daemon=True)
            self._thread.start()

    def append(self, sequences: Sequence[int], positions: Sequence[int], hidden: Tensor) -> None:
        """Add n rows: for each its sequence and its place in the answer, and hidden [n, H] on the device.

        Raises:
            OSError: the thread could not write an earlier step.
        """
        if self._thread is None:
            self._writer.append(sequences, positions, [-1] * len(sequences), hidden)
            return
        if self._error is not None:
            raise self._error
        rows = hidden.detach().to(torch.bfloat16)
        buffer = self._buffer(rows)
        part, ready = buffer[: len(rows)], None
        if self._stream is None:
            part.copy_(rows)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                part.copy_(rows, non_blocking=True)
                ready = torch.cuda.Event(blocking=True)
                ready.record()
            rows.record_stream(self._stream)  # its memory is not used again before the copy is done
        self._queue.put(_Copy(list(sequences), list(positions), part, buffer, ready))

    def close(self) -> None:
        """Wait until everything is written, and close the store.

        Raises:
            OSError: something was not written.
        """
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
        self._writer.close()
        if self._error is not None:
            raise self._error

    def _buffer(self, rows: Tensor) -> Tensor:
        """Memory for these rows, of an earlier step if there is some."""
        while self._buffers:
            buffer = self._buffers.pop()
            if len(buffer) >= len(rows):
                return buffer
        size = 1 << max(len(rows) - 1, 0).bit_length()
        return torch.empty(size, rows.shape[1], dtype=rows.dtype, pin_memory=self._stream is not None)

    def _write(self) -> None:
        while (copy := self._queue.get()) is not None:
            if self._error is not None:
                continue  # nobody is held up; `append` and `close` tell
            try:
                if copy.ready is not None:
                    copy.ready.synchronize()
                self._writer.append(copy.sequences, copy.positions, [-1] * len(copy.sequences), copy.rows)
            except BaseException as error:  # noqa: BLE001 (told to whoever appends next)
                self._error = error
            self._buffers.append(copy.buffer)
