"""Where heads and their targets come from: a folder, or a repository on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from vllm_medusa.errors import MedusaError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ("*.json", "*.safetensors", "*.pt", "*.bin")
# Weights, and what a tokenizer and its chat template are made of.
_TARGET_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors")


def locate_heads(model: str) -> Path:
    """The folder on this machine that holds the heads `model` names.

    Args:
        model: a folder, or a hub id such as "name/repository", which is downloaded (or found in the hub's cache).

    Raises:
        MedusaError: neither a folder nor a repository that can be reached.
    """
    return _locate(model, _FILES, "a folder of heads")


def locate_target(model: str) -> Path:
    """The folder on this machine that holds the whole model `model` names: weights, tokenizer, chat template.

    Args:
        model: a folder, or a hub id. Weights in pickles are downloaded only where there are no others.

    Raises:
        MedusaError: neither a folder nor a repository that can be reached.
    """
    folder = _locate(model, _TARGET_FILES, "the folder of a Hugging Face model")
    if any(folder.glob("*.safetensors")) or Path(model).expanduser().is_dir():
        return folder
    return _locate(model, (*_TARGET_FILES, "*.bin"), "the folder of a Hugging Face model")


def is_hub_id(model: str) -> bool:
    """Whether `model` can only be the name of a repository.

    >>> is_hub_id("HuggingFaceTB/SmolLM2-135M-Instruct"), is_hub_id(".")
    (True, False)
    """
    return not Path(model).expanduser().exists() and _HUB_ID.fullmatch(model) is not None


def _locate(model: str, files: tuple[str, ...], wanted: str) -> Path:
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise MedusaError.of("model", model, "this is a file; name the folder that holds config.json and the weights")
    if not is_hub_id(model):
        raise MedusaError.of("model", model, f"no such folder; name {wanted}, or a hub id")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=list(files)))
    except (RepositoryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MedusaError.of(
            "model", model, f"no such folder, and the hub did not give it ({reason[:120]}); name {wanted}"
        ) from None
