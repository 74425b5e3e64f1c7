"""Good files made bad: bytes flipped, cut and spliced, and JSON values exchanged, as Hypothesis chooses."""

from __future__ import annotations

import copy
import json
import struct
from typing import Any

from hypothesis import strategies as st

# Counts and sizes at the edges of what readers compute with.
EDGES = [0, 1, 7, 8, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
NASTY: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 33, 129, 2**31, 2**40, 2**63, 10**30, 0.0, 1.0, -0.5, 1e-300, 1e300,
    float("nan"), float("inf"), "", "3", "medusa", "target", "per_head", "vllm-medusa/1", "../x", "/etc/passwd",
    "\x1b[2J", "a\nb", "é", "x" * 3000, [], {}, [[]], [0], [[0]], [[0, 0]], [1.0] * 3, [[0.1] * 5] * 3, {"cpu": 8},
    {"num_heads": 3}, {"x": {"x": {"x": [1]}}},
]  # fmt: skip
KEYS = ["num_heads", "num_layers", "topk", "vocab_size", "medusa", "vllm_medusa", "format", "x", "0.0.linear.weight"]


class Bases(tuple):  # type: ignore[type-arg]
    """Good files or values, whose bytes no message should show."""

    def __repr__(self) -> str:
        return f"{len(self)} bases"


def _nasty(draw: st.DrawFn) -> Any:
    return copy.deepcopy(draw(st.sampled_from(NASTY)))


@st.composite
def spoilt_bytes(draw: st.DrawFn, bases: Bases) -> bytes:
    """One of the files, with one to four changes of its bytes."""
    data = bytearray(draw(st.sampled_from(bases)))
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 4]))):
        # Beginnings and ends hold what readers go by: headers, lengths, directories.
        place = draw(st.one_of(st.integers(0, 64), st.integers(0, len(data)), st.integers(len(data) - 200, len(data))))
        place = min(max(place, 0), len(data))
        kind = draw(st.sampled_from(["flip", "cut", "drop", "number", "insert", "splice", "repeat"]))
        if kind == "flip" and place < len(data):
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[place:]
        elif kind == "drop":
            del data[place : place + draw(st.integers(1, 64))]
        elif kind == "number":
            width, edge = draw(st.sampled_from(["<Q", "<I", "<H", ">Q"])), draw(st.sampled_from(EDGES))
            packed = struct.pack(width, edge % 2 ** (8 * struct.calcsize(width)))
            data[place : place + len(packed)] = packed
        elif kind == "insert":
            data[place:place] = draw(st.binary(min_size=1, max_size=32))
        elif kind == "splice":
            other = draw(st.sampled_from(bases))
            start = draw(st.integers(0, len(other)))
            data[place : place + 64] = other[start : start + draw(st.integers(0, 256))]
        elif kind == "repeat":
            data[place:place] = data[place : place + 100] * draw(st.integers(1, 20))
    return bytes(data)


@st.composite
def spoilt_json(draw: st.DrawFn, bases: Bases) -> str:
    """One of the values as JSON text, with one to three changes of what it says."""
    value = json.loads(json.dumps(draw(st.sampled_from(bases))))
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        value = _changed(draw, value)
    text = json.dumps(value)
    if draw(st.integers(0, 9)) == 0 and text.startswith("{") and len(text) > 2:
        key = draw(st.sampled_from([*value]))
        text = "{" + f"{json.dumps(key)}: {json.dumps(_nasty(draw))}, " + text[1:]  # twice
    return text


def _changed(draw: st.DrawFn, value: Any) -> Any:
    """The value with one change somewhere in it."""
    inside = isinstance(value, dict | list) and len(value) > 0 and draw(st.integers(0, 5)) > 0
    if not inside:
        return _other(draw, value)
    key = draw(st.sampled_from(list(value) if isinstance(value, dict) else list(range(len(value)))))
    kind = draw(st.sampled_from(["inside", "inside", "inside", "drop", "rename", "add"]))
    if kind == "inside":
        value[key] = _changed(draw, value[key])
    elif kind == "drop":
        del value[key]
    elif isinstance(value, list):
        value.insert(key, value[key] if kind == "add" else _nasty(draw))
    else:
        moved = value.pop(key) if kind == "rename" else _nasty(draw)
        value[draw(st.sampled_from(KEYS))] = moved
    return value


def _other(draw: st.DrawFn, value: Any) -> Any:
    """Another value, near by or not."""
    if isinstance(value, int) and not isinstance(value, bool) and draw(st.booleans()):
        return value + draw(st.sampled_from([-1, 1, 2, 64, -value, 2**40]))
    if draw(st.integers(0, 19)) == 0:
        for _ in range(draw(st.sampled_from([5, 63, 70, 300]))):
            value = [value]
        return value
    return _nasty(draw)


@st.composite
def spoilt_header(draw: st.DrawFn, bases: Bases) -> bytes:
    """A safetensors file whose header says something else, in good JSON and with the right length."""
    data = draw(st.sampled_from(bases))
    (length,) = struct.unpack("<Q", data[:8])
    header = draw(spoilt_json(Bases([json.loads(data[8 : 8 + length])]))).encode()
    return struct.pack("<Q", len(header)) + header + data[8 + length :]
