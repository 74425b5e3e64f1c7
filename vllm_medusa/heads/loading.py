"""Weights that are loaded into a model while it serves: whoever keeps copies of them hears of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


def after_loading(model: nn.Module, tell: Callable[[], None]) -> None:
    """Call `tell` after each `load_weights` of `model`: the one door for new weights that hosts and trainers share.

    Whoever writes into parameters by another way has to tell by itself.

    >>> class Model(nn.Module):
    ...     def load_weights(self, weights):
    ...         return {name for name, _ in weights}
    >>> model = Model()
    >>> after_loading(model, lambda: print("new weights"))
    >>> model.load_weights([("lm_head.weight", 1)])
    new weights
    {'lm_head.weight'}
    """
    original = getattr(model, "load_weights", None)
    if original is None:
        return

    @functools.wraps(original)
    def load_weights(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:  # also of a loading that broke off halfway
            tell()

    setattr(model, "load_weights", load_weights)  # noqa: B010 - on the instance, where a module has none of this name
