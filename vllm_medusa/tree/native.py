"""The compiled part of lookup and growth."""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

from vllm_medusa.compiled import CannotBuild, load_library

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("cpu_trees.cpp")


@lru_cache(maxsize=1)
def load() -> Any:
    """The library with `medusa_follow` and `medusa_grow`; None, said once, where it cannot be built: then Python does
    the same, some tenths of a millisecond slower per request and step."""
    try:
        library = load_library(_SOURCE)
    except CannotBuild as error:
        logger.info("Trees grow without their compiled part: %s", error)
        return None
    address, number = ctypes.c_void_p, ctypes.c_int64
    library.medusa_follow.argtypes = [
        *(address, number, address, address, number, number, number, ctypes.c_double),
        *(number, address, address),
    ]
    library.medusa_grow.argtypes = [*[address] * 4, *[number] * 5, *[address] * 5]
    library.medusa_follow.restype = library.medusa_grow.restype = None
    return library
