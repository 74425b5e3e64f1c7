"""Which model and heads a command takes."""

from pathlib import Path

import pytest

from vllm_medusa.defaults import MODEL_VARIABLE, bundled_heads, default_model, resolve
from vllm_medusa.errors import MedusaError


def test_named_model_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODEL_VARIABLE, "/somewhere/else")
    chosen = resolve(str(tmp_path), "my-heads")
    assert (chosen.model, chosen.heads) == (str(tmp_path), "my-heads")


def test_variable_stands_in_for_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODEL_VARIABLE, str(tmp_path))
    assert resolve(None, None).model == str(tmp_path)
    assert resolve(None, None).heads == str(bundled_heads())
    assert resolve(None, None, need_heads=False).heads is None


def test_hub_id_passes(tmp_path: Path) -> None:
    assert resolve("HuggingFaceTB/SmolLM2-135M-Instruct", None).model == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_missing_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MedusaError, match=r"model='/no/such/folder': no such folder"):
        resolve("/no/such/folder", None)
    with pytest.raises(MedusaError, match=r"model='\.\./folder': no such folder"):
        resolve("../folder", None)
    monkeypatch.setenv(MODEL_VARIABLE, "/no/such/folder")
    with pytest.raises(MedusaError, match=f"{MODEL_VARIABLE}='/no/such/folder'"):
        default_model()
