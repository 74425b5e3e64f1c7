"""A target's own head, read from its files without loading the rest: the two matrices that heads share, and its logits.

Which of a model's tensors these are is one question (`find_matrices`), asked of its files before training and of vLLM's
modules when serving, so that the two cannot differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.storage import Weights, open_weights
from vllm_medusa.json_file import NotJson, load_json

# Last names of the modules, likeliest first. In a block or a tower the same names mean other things.
_UNEMBEDDINGS = ("lm_head", "embed_out", "output_layer", "output")
_EMBEDDINGS = ("embed_tokens", "tok_embeddings", "wte", "word_embeddings", "embed_in", "embedding", "embeddings")
_ELSEWHERE = re.compile(r"(^|\.)(\d+|mtp|vision\w*|visual\w*|image\w*|audio\w*|encoder)\.")
_PLAIN = "a quantized matrix cannot be read here; name the folder of the model before it was quantized"
# What config.json leaves out where it is the kind's own default.
_DEFAULTS: dict[str, dict[str, float]] = {
    "cohere": {"logit_scale": 0.0625},
    "cohere2": {"logit_scale": 0.0625},
    "gemma2": {"final_logit_softcapping": 30.0},
}
# Kinds whose stored bias vLLM does not add.
_NO_BIAS = ("phimoe",)


@dataclass(frozen=True)
class Target:
    """How a target makes logits of a hidden row, and how it embeds a token.

    Attributes:
        unembedding: [V, H].
        embedding: [V, H], as it is stored: a target may scale what it reads from it, heads do not. The same tensor as
            `unembedding` where the target ties them.
        bias: [V], added to the logits; None: none.
        soft_cap: the logits' bound, by a tanh; None: none.
        scale: factor on the logits.

    >>> table = torch.eye(3, 2)
    >>> Target(table, table, bias=torch.tensor([0.0, 1.0, 2.0]), scale=0.5).logits(torch.tensor([[4.0, 2.0]]))
    tensor([[2.0000, 1.5000, 1.0000]])
    """

    unembedding: Tensor
    embedding: Tensor
    bias: Tensor | None = None
    soft_cap: float | None = None
    scale: float = 1.0

    @property
    def matrices(self) -> tuple[Tensor, Tensor]:
        """Unembedding and embedding, what heads are bound to."""
        return self.unembedding, self.embedding

    def to(self, device: str | torch.device, dtype: torch.dtype) -> Target:
        """The same on a device and in a number format; one tensor stays one."""
        unembedding = self.unembedding.to(device, dtype)
        tied = self.embedding is self.unembedding
        return replace(
            self,
            unembedding=unembedding,
            embedding=unembedding if tied else self.embedding.to(device, dtype),
            bias=None if self.bias is None else self.bias.to(device),
        )

    def outputs(self, tokens: Tensor | None) -> Target:
        """The same that says only `tokens`, int64 [Vd]; None: all."""
        if tokens is None:
            return self
        here = tokens.to(self.unembedding.device)
        bias = None if self.bias is None else self.bias[here]
        return replace(self, unembedding=self.unembedding[here], bias=bias)

    def logits(self, rows: Tensor) -> Tensor:
        """float32 [N, V] of hidden rows [N, H], after the final norm, by products in the unembedding's format."""
        logits = (rows.to(self.unembedding) @ self.unembedding.T).float()
        if self.bias is not None:
            logits += self.bias.float()
        if self.soft_cap is not None:
            logits = (logits / self.soft_cap).tanh_().mul_(self.soft_cap)
        return logits if self.scale == 1.0 else logits.mul_(self.scale)

    @property
    def rule(self) -> str:
        """What is done to the product, in a few words; the same words, the same logits."""
        said = [f"soft cap {self.soft_cap:g}"] if self.soft_cap is not None else []
        said += ["bias"] if self.bias is not None else []
        said += [f"scale {self.scale:.6g}"] if self.scale != 1.0 else []
        return ", ".join(said) or "as it is"


def find_matrices(names: Iterable[str]) -> tuple[str | None, str | None]:
    """Which modules of a decoder are its unembedding and its token embedding; None: there is none by a known name.

    Args:
        names: paths of all modules that hold a matrix, without its own name.

    >>> find_matrices(["gpt_neox.embed_in", "gpt_neox.layers.0.attention.dense", "embed_out"])
    ('embed_out', 'gpt_neox.embed_in')
    >>> find_matrices(["model.layers.0.mlp.output", "model.tok_embeddings", "output", "mtp.tok_embeddings"])
    ('output', 'model.tok_embeddings')
    >>> find_matrices(["transformer.wte", "transformer.wpe"])
    (None, 'transformer.wte')
    """
    outer = [name for name in names if not _ELSEWHERE.search(name)]
    return _first(outer, _UNEMBEDDINGS), _first(outer, _EMBEDDINGS)


def _first(names: list[str], wanted: tuple[str, ...]) -> str | None:
    for last in wanted:
        found = [name for name in names if name.rsplit(".", 1)[-1] == last]
        if found:
            return min(found, key=lambda name: name.count("."))  # the outermost; of two, the first
    return None


def read_target(folder: str | Path) -> Target:
    """The head of the Hugging Face model in `folder`.

    Raises:
        MedusaError: no such folder, weights without an embedding, or quantized ones that are no matrix as they lie.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise MedusaError.of("model", str(folder), "no such folder; name the folder of a Hugging Face model")
    weights, config = open_weights(folder), _text_config(folder)
    modules = {name.removesuffix(".weight"): name for name in weights.shapes if name.endswith(".weight")}
    outer, inner = find_matrices(modules)
    if inner is not None and config.get("tie_word_embeddings") is True:
        outer = None  # a matrix that lies there all the same is not asked
    unembedding = modules[outer] if outer is not None else None
    embedding = modules[inner] if inner is not None else unembedding
    if embedding is None:
        fix = "its weights hold no embed_tokens or lm_head; name a decoder-only model"
        raise MedusaError.of("model", str(folder), fix)
    for name in {embedding, unembedding or embedding}:
        if len(weights.shapes[name]) != 2 or 0 in weights.shapes[name]:
            fix = "must be a matrix, a row per token; download the model again"
            raise MedusaError.of(f"{weights.files[name]}: {name}", list(weights.shapes[name]), fix)
    quantized = next((name for name in weights.shapes if _is_packed(name)), None)
    if unembedding is None and quantized is not None and config.get("tie_word_embeddings") is not True:
        raise MedusaError.of(f"{weights.files[quantized]}", quantized, _PLAIN)
    embedded = _numbers(weights, embedding)
    said = embedded if unembedding in (None, embedding) else _numbers(weights, unembedding)
    return Target(said, embedded, _bias(weights, unembedding, config), *_rule(config))


def _is_packed(name: str) -> bool:
    module, _, last = name.rpartition(".")
    return module.rsplit(".", 1)[-1] in _UNEMBEDDINGS[:2] and last not in ("weight", "bias")


def _numbers(weights: Weights, name: str) -> Tensor:
    read = weights.read(name)
    if not read.is_floating_point():
        raise MedusaError.of(f"{weights.files[name]}: {name}", str(read.dtype), _PLAIN)
    return read


def _bias(weights: Weights, unembedding: str | None, config: dict[str, Any]) -> Tensor | None:
    name = "" if unembedding is None else unembedding.removesuffix("weight") + "bias"
    if name not in weights.shapes or config.get("model_type") in _NO_BIAS:
        return None
    return _numbers(weights, name)


def _text_config(folder: Path) -> dict[str, Any]:
    """config.json, with what it says of the text model over it; empty where there is none."""
    if not (folder / "config.json").is_file():
        return {}
    try:
        raw = load_json(folder / "config.json")
    except NotJson as error:
        raise MedusaError.of("model", str(folder / "config.json"), f"{error}; download the model again") from None
    config: dict[str, Any] = raw if isinstance(raw, dict) else {}
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def _rule(config: dict[str, Any]) -> tuple[float | None, float]:
    """Soft cap and scale of the logits, as vLLM's models read them from a config."""
    given = {**_DEFAULTS.get(str(config.get("model_type")), {}), **config}

    def number(key: str) -> float | None:
        value = given.get(key)
        return float(value) if isinstance(value, int | float) and value else None

    scale = (number("logit_scale") or 1.0) / (number("logits_scaling") or 1.0)
    for key in ("lm_head_multiplier", "output_multiplier", "output_mult"):
        scale *= number(key) or 1.0
    return number("final_logit_softcapping"), scale
