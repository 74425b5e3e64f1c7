"""Heads and targets by folder or hub id; the hub is a stand-in that says what it was asked for."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.source import is_hub_id, locate_heads, locate_target

Asked = list[tuple[str, list[str]]]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Downloads that were asked for: name and patterns; all of them end in one empty folder."""
    asked: Asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


@pytest.mark.parametrize("locate", [locate_heads, locate_target])
def test_a_folder_is_taken_as_it_is(tmp_path: Path, hub: Asked, locate: Any) -> None:
    assert locate(str(tmp_path)) == tmp_path and hub == []


def test_heads_come_from_the_hub_with_config_and_weights(tmp_path: Path, hub: Asked) -> None:
    assert locate_heads("lab/heads") == tmp_path
    assert hub == [("lab/heads", ["*.json", "*.safetensors", "*.pt", "*.bin"])]


def test_a_target_comes_with_its_chat_template_and_without_a_second_copy_of_its_weights(
    tmp_path: Path, hub: Asked
) -> None:
    (tmp_path / "model.safetensors").touch()
    assert locate_target("lab/model") == tmp_path
    ((name, patterns),) = hub
    assert name == "lab/model" and "*.jinja" in patterns and "*.bin" not in patterns


def test_a_target_that_has_only_pickles_is_asked_for_them(hub: Asked) -> None:
    locate_target("lab/model")
    assert ["*.bin" in patterns for _, patterns in hub] == [False, True]


@pytest.mark.parametrize("locate", [locate_heads, locate_target])
def test_what_cannot_be_found_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locate: Any) -> None:
    def offline(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    file = tmp_path / "file"
    file.touch()
    for model, says in (("no/such/folder", "no such folder"), (str(file), "a file"), ("lab/model", "no network")):
        with pytest.raises(MedusaError, match=says):
            locate(model)


def test_a_folder_that_looks_like_a_hub_id_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("lab/model")
    Path("lab/model").mkdir(parents=True)
    assert not is_hub_id("lab/model")
