"""Data files: both forms of a line, and an error that names file and line for every other."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_medusa.bench.demo import demo_datasets
from vllm_medusa.bench.prompts import read_dataset, read_datasets
from vllm_medusa.errors import MedusaError
from vllm_medusa.training.prompts import read_prompts


def written(folder: Path, text: str, name: str = "set.jsonl") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_prompt_and_turns(tmp_path: Path) -> None:
    path = written(tmp_path, '{"prompt": "one", "id": 7}\n\n{"turns": ["two", "not this"]}\n')
    dataset = read_dataset(path)
    assert dataset.name == "set"
    assert dataset.prompts == ("one", "two")
    assert dataset.take(1).prompts == ("one",)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no prompts"),
        ("{", "set.jsonl:1"),
        ('{"prompt": "fine"}\n[]', "set.jsonl:2"),
        ('{"prompt": 3}', "needs `prompt`"),
        ('{"turns": []}', "needs `prompt`"),
        ('{"prompt": ""}', "not empty"),
        ('{"prompt": "\\ud800"}', "set.jsonl:1': holds half a surrogate"),
        ("[" * 100_000, "nested"),
        ('{"prompt": "a", "id": ' + "1" * 5000 + "}", "too long"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(MedusaError, match="data=") as caught:
        read_dataset(written(tmp_path, text))
    assert says in str(caught.value)


@pytest.mark.parametrize("read", [lambda path: list(read_dataset(path).prompts), read_prompts], ids=["bench", "train"])
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte order mark"])
def test_what_other_programs_write(read: Callable[[Path], list[str]], mark: str, tmp_path: Path) -> None:
    """Characters at which Python splits texts are no ends of lines, a byte order mark is no part of the first."""
    prompts = ["a\u2028b", "c\u0085d\u2029e", "f\x0bg\x0ch\x1ci"]
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    path = written(tmp_path, mark + "\r\n".join([*lines[:2], "", lines[2]]) + "\n")
    assert read(path) == prompts


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(MedusaError, match="cannot be read"):
        read_dataset(tmp_path / "nothing.jsonl")


def test_same_stem_twice(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    paths = [written(tmp_path, '{"prompt": "a"}'), written(tmp_path / "other", '{"prompt": "b"}')]
    with pytest.raises(MedusaError, match="rename one"):
        read_datasets(paths, 10)


def test_demo_prompts() -> None:
    datasets = demo_datasets()
    assert [dataset.name for dataset in datasets] == ["chat", "code", "math"]
    assert all(len(dataset.prompts) == 3 for dataset in datasets)
