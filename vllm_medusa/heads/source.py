"""Where heads and their targets come from: a folder, or a repository on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm_medusa.errors import MedusaError

# Not "../heads" or "./heads": these are folders that are not there.
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_FILES = ("*.json", "*.safetensors", "*.pt", "*.bin")
# Weights, and what a tokenizer and its chat template are made of.
_TARGET_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors")


def locate_heads(
    model: str, *, revision: str | None = None, cache: str | None = None, token: bool | str | None = None
) -> Path:
    """The folder on this machine that holds the heads `model` names.

    Args:
        model: a folder, or a hub id such as "name/repository", which is downloaded (or found in the hub's cache).
        revision: of a repository: a branch, a tag or a commit; None: its default.
        cache: folder in which downloads are kept; None: the hub's own.
        token: for the hub; True: the one that is stored on this machine; None: whatever the hub's library finds.

    Raises:
        MedusaError: neither a folder nor a repository that can be reached; a revision of a folder.
    """
    options = {"revision": revision, "cache_dir": cache, "token": token}
    asked = {name: value for name, value in options.items() if value is not None}
    folder = _locate(model, _FILES, "a folder of heads", asked)
    if revision is not None and Path(model).expanduser().is_dir():
        raise MedusaError.of("revision", revision, "a folder has none; name a hub id, or leave revision out")
    return folder


def locate_target(
    model: str, *, revision: str | None = None, cache: str | None = None, token: bool | str | None = None
) -> Path:
    """The folder on this machine that holds the whole model `model` names: weights, tokenizer, chat template.

    Args:
        model: a folder, or a hub id. Weights in pickles are downloaded only where there are no others.
        revision, cache, token: as in `locate_heads`.

    Raises:
        MedusaError: neither a folder nor a repository that can be reached.
    """
    options = {"revision": revision, "cache_dir": cache, "token": token}
    asked = {name: value for name, value in options.items() if value is not None}
    folder = _locate(model, _TARGET_FILES, "the folder of a Hugging Face model", asked)
    if any(folder.glob("*.safetensors")) or os.path.isdir(os.path.expanduser(model)):
        return folder
    return _locate(model, (*_TARGET_FILES, "*.bin"), "the folder of a Hugging Face model", asked)


def is_hub_id(model: str) -> bool:
    """Whether `model` can only be the name of a repository.

    >>> is_hub_id("HuggingFaceTB/SmolLM2-135M-Instruct"), is_hub_id(".")
    (True, False)
    """
    return _HUB_ID.fullmatch(model) is not None and not Path(model).exists()


def _locate(model: str, files: tuple[str, ...], wanted: str, options: Mapping[str, Any] = MappingProxyType({})) -> Path:
    try:
        folder = Path(model).expanduser()
        is_folder, is_there = folder.is_dir(), folder.exists()
    except (OSError, RuntimeError) as error:  # a name too long, a home of nobody, a folder above without rights
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise MedusaError.of("model", model, f"cannot be looked at ({reason}); name {wanted}, or a hub id") from None
    if is_folder:
        return folder
    if is_there:
        raise MedusaError.of("model", model, "this is a file; name the folder that holds config.json and the weights")
    if not is_hub_id(model):
        raise MedusaError.of("model", model, f"no such folder; name {wanted}, or a hub id")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=list(files), **options))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        what = f"no such folder, and the hub did not give it ({why_not(error)})"
        if "revision" in options:
            what += f", at revision {options['revision']!r}"
        raise MedusaError.of("model", model, f"{what}; name {wanted}") from None


def why_not(error: Exception) -> str:
    """Why the hub did not give something, in a few words."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, and the cache does not hold it"
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
