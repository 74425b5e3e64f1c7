"""Heads for others: a repository on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.source import is_hub_id, why_not

FILES = ("config.json", "model.safetensors", "README.md")


def open_repository(name: str, token: Any = None) -> None:
    """Make sure, before hours of work, that heads can be put there. A new repository is private.

    Args:
        name: ORG/NAME.
        token: as vLLM is told it; None: the one that the hub's library finds.

    Raises:
        MedusaError: no such name can be, no right to write, no hub.
    """
    if not is_hub_id(name):
        raise MedusaError.of("push_to_hub", name, "give the name of a repository, ORG/NAME")
    from huggingface_hub import HfApi

    try:
        HfApi(token=token).create_repo(name, exist_ok=True, private=True)
    except Exception as error:
        fix = f"the hub does not let you write there ({why_not(error)}); log in (hf auth login), or name your own"
        raise MedusaError.of("push_to_hub", name, fix) from error


def push(folder: Path, name: str, token: Any = None) -> str:
    """Put trained heads and their card there, in one commit; returns the address of the commit.

    Raises:
        MedusaError: the hub did not take them; they stay in the folder.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    try:
        added = [CommitOperationAdd(path_in_repo=file, path_or_fileobj=str(folder / file)) for file in FILES]
        done = HfApi(token=token).create_commit(name, operations=added, commit_message="Heads for vllm-medusa")
    except Exception as error:
        fix = f"the hub did not take them ({why_not(error)}); they are in {folder}: the same command tries again"
        raise MedusaError.of("push_to_hub", name, fix) from error
    return str(done.commit_url)
