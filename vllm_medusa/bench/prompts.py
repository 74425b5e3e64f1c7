"""The data sets of a bench: one JSON per line, with `prompt` or `turns`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_medusa.errors import MedusaError


@dataclass(frozen=True)
class Dataset:
    """A name (the file's stem) and its prompts, in the file's order."""

    name: str
    prompts: tuple[str, ...]

    def take(self, count: int) -> "Dataset":
        """The first `count` prompts; all of them if there are fewer."""
        return Dataset(self.name, self.prompts[:count])


def read_dataset(path: Path) -> Dataset:
    """Read a .jsonl file. A line is an object with `prompt` (text), or `turns` (list of texts: the first is used).

    Raises MedusaError naming the file and the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MedusaError.of("data", str(path), f"cannot be read as UTF-8 text ({error})") from error
    prompts = [_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise MedusaError.of("data", str(path), "the file has no prompts; give one JSON object per line")
    return Dataset(path.stem, tuple(prompts))


def read_datasets(paths: Sequence[Path], count: int) -> list[Dataset]:
    """Read several files, the first `count` prompts of each. Two files of one stem would mix in the report: refused."""
    datasets = [read_dataset(path).take(count) for path in paths]
    names = [dataset.name for dataset in datasets]
    for name in names:
        if names.count(name) > 1:
            raise MedusaError.of("data", name, "two data files have this stem; rename one, reports go by it")
    return datasets


def _prompt(line: str, place: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise MedusaError.of("data", place, f"not JSON ({error.msg})") from error
    if isinstance(row, dict):
        if isinstance(row.get("prompt"), str):
            return str(row["prompt"])
        turns = row.get("turns")
        if isinstance(turns, list) and turns and isinstance(turns[0], str):
            return str(turns[0])
    raise MedusaError.of("data", place, "a line needs `prompt` (text) or `turns` (a list of texts)")
