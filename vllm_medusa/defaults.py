"""Which model and heads a command works on: what the user named, else SmolLM2-135M-Instruct and its bundled heads."""

import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.source import is_hub_id

MODEL_VARIABLE = "VLLM_MEDUSA_MODEL"


@dataclass(frozen=True)
class Chosen:
    """A target model (folder or hub id) and the folder of its heads, None where none are needed."""

    model: str
    heads: str | None


def resolve(model: str | None, heads: str | None, *, need_heads: bool = True) -> Chosen:
    """Fill in the defaults; SmolLM2 is fetched (once) only when the user names no model.

    A model without heads gets the bundled ones: right for a copy of SmolLM2-135M-Instruct, refused at start-up by name
    for a model of other sizes.
    """
    if need_heads and heads is None:
        heads = str(bundled_heads())
    return Chosen(_checked(model) if model else default_model(), heads if need_heads else None)


def default_model() -> str:
    """The folder that VLLM_MEDUSA_MODEL names, else the cached SmolLM2-135M-Instruct, fetched when it is not there."""
    named = os.environ.get(MODEL_VARIABLE)
    if named:
        return _checked(named, MODEL_VARIABLE)
    from vllm_medusa.smollm2 import ensure_smollm2

    return str(ensure_smollm2())


def bundled_heads() -> Path:
    """The heads for SmolLM2-135M-Instruct that ship inside the package."""
    return Path(str(resources.files("vllm_medusa") / "assets" / "smollm2-135m-instruct"))


def _checked(model: str, key: str = "model") -> str:
    """A folder or a hub id; what is neither is refused here, in one sentence, before any engine starts."""
    folder = os.path.expanduser(model)  # unlike Path's it leaves a home that nobody has as it is
    if os.path.isdir(folder):
        return folder
    if is_hub_id(model):
        return model
    raise MedusaError.of(key, model, "no such folder; name a folder with config.json and weights, or a hub id")
