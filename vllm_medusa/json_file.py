"""JSON that people and other programs wrote, read with suspicion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Far beyond any config or tree, far below what would hurt: a config.json of a whole model has some 100 kB.
MOST_BYTES, MOST_NESTED, MOST_DIGITS = 16 * 2**20, 64, 300


class NotJson(Exception):
    """Why there is no JSON to be had, in words that go on from "the file"."""


def load_json(file: Path) -> Any:
    """The value that `file` holds.

    Raises:
        NotJson: no regular file, one that cannot be read or is too large, or what `parse_json` refuses.
    """
    try:
        if not file.is_file():  # a pipe would never end, a device neither
            link = " (a link to nowhere)" if file.is_symlink() and not file.exists() else ""
            raise NotJson(f"is not a file{link}" if file.exists() or link else "cannot be read: it does not exist")
        size = file.stat().st_size
        if size > MOST_BYTES:
            raise NotJson(f"is too large to be one ({size:,} bytes)")
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotJson(f"is not text in UTF-8 (byte {error.start})") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a null in it
        raise NotJson(f"cannot be read ({getattr(error, 'strerror', None) or error})") from None
    return parse_json(text)


def parse_json(text: str) -> Any:
    """The value that `text` says.

    Raises:
        NotJson: no JSON, a key that stands twice in one object, values nested too deeply, numbers too long, strings
            that no terminal should print.

    >>> parse_json('{"tree": [[0], [0, 0]]}')
    {'tree': [[0], [0, 0]]}
    """
    if text.startswith("\ufeff"):
        raise NotJson("begins with a byte order mark; save it as UTF-8 without one")
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_int=_integer)
    except RecursionError:
        raise NotJson(f"is nested more than {MOST_NESTED} deep") from None
    except ValueError as error:
        raise NotJson(f"is not JSON ({error})") from None
    _check(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for index, key in enumerate(keys) if key in keys[:index])
        raise NotJson(f"holds the key {twice!r} twice; keep one")
    return found


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise NotJson(f"holds a number of {len(digits)} digits")
    return int(digits)


def _check(value: Any) -> None:
    """Depth and strings, level by level: no recursion that a file could drive too deep."""
    level: list[Any] = [value]
    for _ in range(MOST_NESTED + 1):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, str) and not all(map(_is_text, each)):
                raise NotJson("holds a string with control characters or half a surrogate pair")
            if isinstance(each, dict):
                inner += [*each.keys(), *each.values()]
            elif isinstance(each, list):
                inner += each
        if not inner:
            return
        level = inner
    raise NotJson(f"is nested more than {MOST_NESTED} deep")


def _is_text(character: str) -> bool:
    code = ord(character)
    return (code >= 32 and code != 127 and not 0xD800 <= code < 0xE000) or character in "\t\n\r"
