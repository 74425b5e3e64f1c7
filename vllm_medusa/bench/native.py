"""Our heads in the format of vLLM's own Medusa (up to 0.32), so that both serve the same weights."""

import json
from pathlib import Path

from vllm_medusa.errors import MedusaError


def export_heads(heads: str, model: str, folder: Path) -> int:
    """Write the heads in vLLM's format into `folder`; returns their number, the length of vLLM's chain.

    Raises:
        MedusaError: heads that vLLM cannot express (they read the root token), or a target whose unembedding we do
            not find.
    """
    from vllm_medusa.heads.checkpoint import load_heads, save_vllm
    from vllm_medusa.heads.source import locate_heads
    from vllm_medusa.heads.target import read_target

    loaded = load_heads(locate_heads(heads))
    unembedding = read_target(locate_heads(model)).unembedding if loaded.config.unembedding == "target" else None
    save_vllm(loaded, folder, unembedding)
    return loaded.config.num_heads


def check_expressible(heads: str) -> None:
    """Refuse heads in our format that vLLM's own Medusa cannot express, before minutes of starting engines.

    Raises:
        MedusaError: the heads read the root token, as the bundled ones do.
    """
    config = Path(heads) / "config.json"
    if config.is_file() and json.loads(config.read_text(encoding="utf-8")).get("root_conditioned"):
        fix = "vLLM's own Medusa has no heads that read the root token; name plain ones (vllm-medusa train --plain)"
        raise MedusaError.of("native-heads", heads, fix)
