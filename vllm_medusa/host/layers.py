"""The attention layers of a target: those that can check trees, or one error that names the first that cannot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from vllm_medusa.errors import MedusaError

# Caches of bytes that our kernels read, by the host's name for them: one scale a layer, for keys and for values.
FLOAT8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def decoder_layers(layers: Iterable[Any], implementations: tuple[type, ...]) -> list[Attention]:
    """The attention layers among a model's, all of them able to check trees.

    Args:
        layers: the host's layers with a forward pass of their own.
        implementations: of attention that tree rows can share a cache with.

    Raises:
        MedusaError: a layer with a feature that tree rows do not have, or with another implementation.
    """
    found = []
    for layer in layers:
        if not isinstance(layer, Attention):
            continue
        impl: Any = layer.impl
        # Subclasses of the host's layer see keys in ways of their own (chunks, cross attention, static sinks).
        plain = type(layer) is Attention and impl.attn_type == AttentionType.DECODER
        if not plain or not issubclass(type(impl), implementations):
            fix = f"attention by {type(layer).__name__} with {type(impl).__name__} cannot check trees yet"
            raise MedusaError.of("model", layer.layer_name, fix)
        cache = impl.kv_cache_dtype
        for what, present in (
            ("ALiBi", impl.alibi_slopes is not None),
            (f"a KV cache of {cache}", is_quantized_kv_cache(cache) and cache not in FLOAT8),
            ("values of another size than keys", layer.head_size_v != layer.head_size),
        ):
            if present:
                raise MedusaError.of("model", layer.layer_name, f"attention with {what} cannot check trees yet")
        found.append(layer)
    return found


def attend_as_cpus_do(layers: Mapping[str, Any]) -> bool:
    """Whether the host chose its attention for CPUs; Triton's interpreter serves with that for GPUs."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    return any(isinstance(getattr(layer, "impl", None), CPUAttentionBackendImpl) for layer in layers.values())
