"""Where heads come from: a folder, or a repository on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from vllm_medusa.errors import MedusaError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ["*.json", "*.safetensors", "*.pt", "*.bin"]


def locate_heads(model: str) -> Path:
    """The folder on this machine that holds the heads `model` names.

    Args:
        model: a folder, or a hub id such as "name/repository", which is downloaded (or found in the hub's cache).

    Raises:
        MedusaError: neither a folder nor a repository that can be reached.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise MedusaError.of("model", model, "this is a file; name the folder that holds config.json and the weights")
    if not _HUB_ID.fullmatch(model):
        raise MedusaError.of("model", model, "no such folder; name the folder that holds the heads, or a hub id")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=_FILES))
    except (RepositoryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MedusaError.of(
            "model", model, f"no such folder, and the hub did not give it ({reason[:120]}); name a folder of heads"
        ) from None
