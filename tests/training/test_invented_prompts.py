"""Files of prompts and texts: what is read, and which line of a bad file is named."""

from pathlib import Path

import pytest

from vllm_medusa.errors import MedusaError
from vllm_medusa.training.prompts import read_prompts, read_texts


def test_prompts_are_read_from_prompt_or_the_first_turn(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"turns": ["two", "three"]}\n', encoding="utf-8")
    assert read_prompts(file) == ["one", "two"]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "holds no prompt"),
        ('{"prompt": "a"}\nnot json\n', r"prompts\.jsonl:2"),
        ('{"question": "a"}\n', r"prompts\.jsonl:1"),
        ('{"turns": []}\n', r"prompts\.jsonl:1"),
        ('{"prompt": 3}\n', "must be a string"),
        ('{"prompt": ""}\n', "not empty"),
        ("[1]\n", r"prompts\.jsonl:1"),
        ("3\n", r"prompts\.jsonl:1"),
    ],
)
def test_a_bad_prompt_file_is_named_with_its_line(tmp_path: Path, content: str, named: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(MedusaError, match=named):
        read_prompts(file)


def test_a_missing_or_binary_prompt_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MedusaError, match="cannot be read"):
        read_prompts(tmp_path / "nowhere.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MedusaError, match="cannot be read"):
        read_prompts(tmp_path / "binary")


def test_texts_are_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "one\\ntwo"}\n{"text": "a\u2028b"}\n', encoding="utf-8")
    assert read_texts(file) == ["one\ntwo", "a\u2028b"]
    file.write_text('{"prompt": "one"}', encoding="utf-8")
    with pytest.raises(MedusaError, match=r'texts=.*texts\.jsonl:1.*"text"'):
        read_texts(file)
