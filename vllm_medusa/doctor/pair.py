"""Heads and the model they are for: readable, and of matching sizes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_medusa.defaults import MODEL_VARIABLE, bundled_heads
from vllm_medusa.doctor.finding import Finding
from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.checkpoint import check_heads, load_heads
from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.heads.opening import read_json
from vllm_medusa.heads.source import is_hub_id, locate_heads, why_not


def check_pair(model: str | None, heads: str | None) -> Iterator[Finding]:
    """Read the heads, values too, and compare them with what the model's config says.

    Args:
        model: folder or hub id (of which only config.json is fetched); None: SmolLM2-135M-Instruct where it is cached.
        heads: folder or hub id; None: the bundled ones.
    """
    subject = "heads" if heads else "bundled heads"
    try:
        folder = locate_heads(heads or str(bundled_heads()))
        config = load_heads(folder).config
    except MedusaError as error:
        yield Finding(subject, "bad", str(error), "" if heads else "install vllm-medusa again: its files are damaged")
        return
    detail = f"{config.num_heads} heads for {config.base_model or 'a model that they do not name'}, readable"
    if config.calibration is None:
        advice = "vllm-medusa calibrate makes their probabilities honest; dynamic trees live on that"
        yield Finding(subject, "note", f"{detail}, not calibrated", advice)
    else:
        yield Finding(subject, "ok", f"{detail}, calibrated")
    yield _check_model(model or _known_model(), config)


def _check_model(model: str | None, heads: HeadsConfig) -> Finding:
    if model is None:
        return Finding("model", "ok", "SmolLM2-135M-Instruct is fetched when first used; name yours by --model")
    try:
        raw = _model_config(model)
        hidden, vocab = _size(raw, "hidden_size"), _size(raw, "vocab_size")
        if hidden is None or vocab is None:
            detail = f"{model}: its config.json gives no hidden_size or no vocab_size"
            return Finding("model", "bad", detail, "name the folder of a decoder-only Hugging Face model")
    except MedusaError as error:
        return Finding("model", "bad", str(error))
    try:
        check_heads(heads, hidden, vocab)
    except MedusaError as error:
        return Finding("model", "bad", f"{model}: {error}", "name heads that were trained for it by --heads")
    return Finding("model", "ok", f"{model}: rows of {hidden}, {vocab} tokens; the heads fit")


def _known_model() -> str | None:
    """The default model where it lies on this machine already: looking must not fetch."""
    from vllm_medusa.smollm2 import cached_model

    if os.environ.get(MODEL_VARIABLE):
        return os.environ[MODEL_VARIABLE]
    cached = cached_model()
    return str(cached) if (cached / "config.json").is_file() else None


def _model_config(model: str) -> dict[str, Any]:
    if not is_hub_id(model):
        folder = Path(model)
        if not folder.is_dir():
            raise MedusaError.of("model", model, "no such folder; name the folder of a Hugging Face model, or a hub id")
        return read_json(folder / "config.json")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return read_json(Path(hf_hub_download(model, "config.json")))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        fix = f"no such folder, and the hub did not give its config.json ({why_not(error)}); name a folder"
        raise MedusaError.of("model", model, fix) from None


def _size(raw: dict[str, Any], key: str) -> int | None:
    """A size from the config, or from its part about text where there are several."""
    inner = raw.get("text_config")
    value = raw.get(key, inner.get(key) if isinstance(inner, dict) else None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
