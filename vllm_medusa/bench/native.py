"""Our heads in the format of vLLM's own Medusa (up to 0.32), so that both serve the same weights."""

import json
from pathlib import Path
from typing import Any

from vllm_medusa.errors import MedusaError

# Where a target keeps its unembedding; the embedding stands in when the two are tied.
UNEMBEDDING_NAMES = ("lm_head.weight", "model.embed_tokens.weight")


def export_heads(heads: str, model: str, folder: Path) -> int:
    """Write the heads in vLLM's format into `folder`; returns their number, the length of vLLM's chain.

    Raises:
        MedusaError: heads that vLLM cannot express (they read the root token), or a target whose unembedding we do
            not find.
    """
    from vllm_medusa.heads.checkpoint import load_heads, save_vllm
    from vllm_medusa.heads.source import locate_heads

    loaded = load_heads(locate_heads(heads))
    unembedding = target_unembedding(model) if loaded.config.unembedding == "target" else None
    save_vllm(loaded, folder, unembedding)
    return loaded.config.num_heads


def target_unembedding(model: str) -> Any:
    """The target's lm_head, a tensor [V, H], read from its safetensors without loading the rest."""
    from safetensors import safe_open

    from vllm_medusa.heads.source import locate_heads

    folder = locate_heads(model)  # a folder, or a hub id, as for heads
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    else:
        files = dict.fromkeys(UNEMBEDDING_NAMES, "model.safetensors")
    for name in UNEMBEDDING_NAMES:
        if name not in files or not (folder / files[name]).exists():
            continue
        with safe_open(folder / files[name], framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 (safe_open is not a mapping)
                return tensors.get_tensor(name)
    raise MedusaError.of("model", model, f"has no {' or '.join(UNEMBEDDING_NAMES)}: leave native-chain out for it")
