"""The data sets of a bench: one JSON per line, with `prompt` or `turns`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_medusa.errors import MedusaError
from vllm_medusa.json_lines import read_json_lines


@dataclass(frozen=True)
class Dataset:
    """A name (the file's stem) and its prompts, in the file's order."""

    name: str
    prompts: tuple[str, ...]

    def fitting(self, lengths: Sequence[int], most: int) -> "Dataset":
        """Those of its prompts that have at most `most` tokens; `lengths` are all prompts' own.

        >>> Dataset("set", ("short", "too long")).fitting([3, 9], 8).prompts
        ('short',)

        Raises MedusaError where there is none.
        """
        kept = tuple(prompt for prompt, length in zip(self.prompts, lengths, strict=True) if length <= most)
        if not kept:
            fix = f"no prompt leaves room for an answer: {most} tokens would, the shortest has {min(lengths)}"
            raise MedusaError.of("data", self.name, f"{fix}; lower --max-tokens, or give shorter ones")
        return Dataset(self.name, kept)

    def take(self, count: int) -> "Dataset":
        """The first `count` prompts; all of them if there are fewer."""
        return Dataset(self.name, self.prompts[:count])


def read_dataset(path: Path) -> Dataset:
    """Read a .jsonl file. A line is an object with `prompt` (text), or `turns` (list of texts: the first is used).

    Raises MedusaError naming the file and the line.
    """
    prompts = [_prompt(row, place) for place, row in read_json_lines(path, "data")]
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


def _prompt(row: Any, place: str) -> str:
    if isinstance(row, dict):
        turns = row.get("turns")
        text = row["prompt"] if "prompt" in row else turns[0] if isinstance(turns, list) and turns else None
        if isinstance(text, str) and text:
            return text
    raise MedusaError.of("data", place, "a line needs `prompt` (text) or `turns` (a list of texts), not empty")
