"""Data files: both forms of a line, and an error that names file and line for every other."""

from pathlib import Path

import pytest

from vllm_medusa.bench.demo import demo_datasets
from vllm_medusa.bench.prompts import read_dataset, read_datasets
from vllm_medusa.errors import MedusaError


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
    ],
)
def test_bad_files(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(MedusaError, match="data=") as caught:
        read_dataset(written(tmp_path, text))
    assert says in str(caught.value)


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
