"""The two matrices of a target that heads share, where the host keeps them in parts or quantized."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.parts import TargetPart
from vllm_medusa.host.ranks import gather
from vllm_medusa.proposer import shared_modules

_PLAIN = (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)


def part_of(model: nn.Module) -> TargetPart | None:
    """What this rank has of a target; None where that is all of it, as plain matrices.

    Raises:
        MedusaError: it is not, and the host's layers for it are of a kind that we do not know.
    """
    found = dict(zip(("lm_head", "embed_tokens"), shared_modules(model), strict=True))
    layers = {name: layer for name, layer in found.items() if layer is not None}
    ranks = get_tp_group().world_size
    if ranks == 1 and all(_plain(layer) is not None for layer in layers.values()):
        return None
    for name, layer in layers.items():
        if not isinstance(layer, VocabParallelEmbedding) or layer.tp_size != ranks:
            kind = f"a {name} of this kind cannot be shared with heads, in parts or quantized; serve the model plain"
            raise MedusaError.of(f"model's {name}", type(layer).__name__, kind)
    if "embed_tokens" not in layers:
        raise MedusaError.of(
            "model", type(model).__name__, "it has no embed_tokens to share with heads; serve it plain"
        )
    return _part(layers.get("lm_head", layers["embed_tokens"]), layers["embed_tokens"])


def _part(unembedding: Any, embedding: Any) -> TargetPart:
    indices = unembedding.shard_indices
    first = indices.org_vocab_start_index
    rows = indices.org_vocab_end_index - first
    weight = _plain(unembedding)

    def multiply(states: Tensor) -> Tensor:
        logits: Tensor = unembedding.quant_method.apply(unembedding, states, bias=None)
        return logits[:, :rows]

    def embed(tokens: Tensor) -> Tensor:
        # Not the layer's own `forward`: heads are trained on rows as they are, which some models scale.
        found: Tensor = VocabParallelEmbedding.forward(embedding, tokens)
        return found

    return TargetPart(
        vocab_size=unembedding.org_vocab_size,
        hidden_size=unembedding.embedding_dim,
        dtype=unembedding.params_dtype,
        device=next(embedding.parameters()).device,
        first=first,
        rows=rows,
        weight=None if weight is None else weight[:rows],
        multiply=multiply,
        embed=embed,
        gather=gather,
    )


def _plain(layer: Any) -> Tensor | None:
    """A layer's weight [rows, H], if it is a plain matrix; the host may keep it packed elsewhere."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.dtype.itemsize < 2:
        return None
    method = getattr(layer, "quant_method", None)
    return weight.data if method is None or isinstance(method, _PLAIN) else None
