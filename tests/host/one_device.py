"""Finds tensors of two devices in one operation, which a GPU refuses and a CPU never shows.

The other device is "meta", which knows shapes alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ELSEWHERE = torch.device("meta")
COPIES = {
    torch.ops.aten._to_copy.default,
    torch.ops.aten.copy_.default,
    torch.ops.aten._has_compatible_shallow_copy_type.default,  # asked by Module.to
}


class OneDevice(TorchDispatchMode):
    """Raises where an operation gets tensors of two devices; a single number may come from a CPU.

    >>> with OneDevice():
    ...     torch.zeros(2, device=ELSEWHERE).index_select(0, torch.arange(2))
    Traceback (most recent call last):
        ...
    AssertionError: aten.index_select.default gets tensors of cpu, meta
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors if tensor.dim() or tensor.device == ELSEWHERE}
        if function not in COPIES and len(devices) > 1:
            raise AssertionError(f"{function} gets tensors of {', '.join(sorted(devices))}")
        return function(*args, **(kwargs or {}))


# What only looks at a tensor in another way launches nothing.
VIEWS = {
    *("_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "expand", "lift_fresh", "permute", "select"),
    *("slice", "split", "split_with_sizes", "squeeze", "t", "tensor_split", "transpose", "unbind", "unflatten"),
    *("unsqueeze", "view"),
}


class Launches(TorchDispatchMode):
    """Counts operations that a GPU would launch a kernel for (some launch more than one)."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.__name__.split(".")[0] not in VIEWS
        return function(*args, **(kwargs or {}))
