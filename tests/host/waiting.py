"""Finds what would make the host wait for a device: operations whose result, or its size, is a value of a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
ALWAYS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
    aten._unique2.default,
}
BY_INDEX = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class NoWaiting(TorchDispatchMode):
    """Raises where an operation would wait.

    >>> with NoWaiting():
    ...     torch.ones(2).sum().item()
    Traceback (most recent call last):
        ...
    AssertionError: aten._local_scalar_dense.default waits for the device
    """

    paused = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = function in ALWAYS or (
            function in BY_INDEX and any(index is not None and index.dtype == torch.bool for index in args[1])
        )
        assert self.paused or not waits, f"{function} waits for the device"
        return function(*args, **(kwargs or {}))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """While the host's own code runs."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before
