"""Files of prompts: one JSON value a line, read with suspicion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_medusa.errors import MedusaError


def read_json_lines(path: Path, key: str) -> list[tuple[str, Any]]:
    """(place, value) of every line that is not blank; the place is "file:number", for messages.

    Only a line feed ends a line (before it, a carriage return is dropped): JSON strings may hold U+2028, U+0085 and
    other characters at which Python would split a text. A byte order mark at the beginning is no part of the file.

    Args:
        path: a text in UTF-8.
        key: what the user called the file, for messages.

    Raises:
        MedusaError: a file that cannot be read, a line that is not JSON.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise MedusaError.of(key, str(path), f"cannot be read as UTF-8 text ({error}); give a .jsonl file") from error
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            found.append((f"{path}:{number}", _parse(line, f"{path}:{number}", key)))
    return found


def _parse(line: str, place: str, key: str) -> Any:
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is JSON, and no text
    except UnicodeEncodeError:
        raise MedusaError.of(key, place, "holds half a surrogate pair, which is no character; save it again") from None
    except RecursionError:
        raise MedusaError.of(key, place, "is nested too deeply; give one JSON object") from None
    except ValueError as error:
        reason = getattr(error, "msg", None) or "a number too long"
        raise MedusaError.of(key, place, f"not JSON ({reason}); give one object a line") from None
    return value
