"""Heads for the hub: what is sent, and what is said when it cannot be."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from vllm_medusa.errors import MedusaError
from vllm_medusa.training.sharing import FILES, open_repository, push


def test_weights_config_and_card_are_sent_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the hub's own client: what it would commit."""
    for name in ("config.json", "model.safetensors", "README.md", "notes.txt", "model.safetensors.partial"):
        (tmp_path / name).write_text(name)
    commits: list[Any] = []

    def create_commit(self: Any, repo_id: str, operations: Any, **more: Any) -> Any:
        commits.append((self.token, repo_id, {op.path_in_repo for op in operations}))
        return SimpleNamespace(commit_url="https://hub/commit", _endpoint=None)

    monkeypatch.setattr(huggingface_hub.HfApi, "create_commit", create_commit)
    assert push(tmp_path, "lab/heads", "secret") == "https://hub/commit"
    assert commits == [("secret", "lab/heads", {"config.json", "model.safetensors", "README.md"})]


def test_no_hub_is_said_before_hours_of_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(MedusaError, match=r"push_to_hub='heads': give the name of a repository, ORG/NAME"):
        open_repository("heads")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(MedusaError, match=r"push_to_hub='lab/heads': the hub does not let you write.*HF_HUB_OFFLINE"):
        open_repository("lab/heads")
    for name in FILES:
        (tmp_path / name).write_text("{}")
    with pytest.raises(MedusaError, match=r"the hub did not take them .*the same command tries again"):
        push(tmp_path, "lab/heads")
