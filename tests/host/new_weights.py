"""What tests of weights that change do to an engine, in this process or in the interpreter's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engines import Engine, random_prompts, start

from vllm_medusa.heads.checkpoint import load_heads
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.proposer import _matrices

OPTIONS: dict[str, Any] = {"max_model_len": 512, "block_size": 32, "enable_prefix_caching": True}


def by_reloading(engine: Engine, other: Path) -> None:
    """vLLM's own `reload_weights`, of another checkpoint."""
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})


def by_load_weights(engine: Engine, other: Path) -> None:
    """As trainers do that send weights to the model itself, here in two pieces; no worker hears of it."""
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    weights = list(load_file(other / "model.safetensors").items())
    config = engine.llm.llm_engine.vllm_config

    def load(model: Any) -> None:
        with set_current_vllm_config(config):
            initialize_layerwise_reload(model)
            for part in (weights[::2], weights[1::2]):
                model.load_weights(iter(part))
            finalize_layerwise_reload(model, config.model_config)

    load(engine.runner.get_model())


def by_sleeping(engine: Engine, other: Path) -> None:
    """Level 2: what lay in memory is lost; the user loads the target anew."""
    engine.llm.sleep(level=2)
    lose(engine)
    engine.llm.wake_up()
    by_reloading(engine, other)


def by_waking_in_pieces(engine: Engine, other: Path) -> None:
    """The same, weights first, the cache when they have come."""
    engine.llm.sleep(level=2)
    lose(engine)
    engine.llm.wake_up(tags=["weights"])
    by_load_weights(engine, other)
    engine.llm.wake_up(tags=["kv_cache"])


@torch.inference_mode()
def lose(engine: Engine, *, target: bool = True) -> None:
    """What level 2 does to memory on a GPU: garbage in all that was made while the model was loaded."""
    heads = engine.runner.drafter.heads
    for tensor in [*heads.state_dict().values(), *(engine.runner.model.state_dict().values() if target else ())]:
        tensor.fill_(2**62 if tensor.dtype == torch.int64 else float("nan"))
    if heads.token_map is not None:
        heads._bound_unembedding.fill_(float("nan"))
    heads._scale.fill_(float("nan"))
    if hasattr(engine.runner, "counts"):  # Model Runner V2
        engine.runner.counts._sums.fill_(float("nan"))
        if engine.runner.trees.lookups is not None:
            engine.runner.trees.lookups._tally.fill_(float("nan"))
            engine.runner.trees.lookups._expected.fill_(2**62)


WAYS: dict[str, Callable[[Engine, Path], None]] = {
    way.__name__: way for way in (by_reloading, by_load_weights, by_sleeping, by_waking_in_pieces)
}


def change(
    model: Path, heads: Path, other: Path, way: str, begin: Callable[..., Engine] = start, **options: Any
) -> dict[str, Any]:
    """Serve `model`, change its weights to those of `other`, and serve again.

    Args:
        model, other: of the same sizes.
        heads: for both.
        way: of WAYS.
        begin: starts engines.
        options: of the engine with trees.
    """
    from vllm import SamplingParams

    prompts = random_prompts(np.random.default_rng(3), [4, 17, 40])
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    dtype = options.get("dtype", "float32")
    truth = begin(other, dtype=dtype, **OPTIONS).tokens(prompts, params)
    engine = begin(model, heads, **OPTIONS, **options)
    by_reloading(engine, model)  # another test may have left it with other weights
    engine.llm.reset_prefix_cache()
    before = engine.tokens(prompts, params)
    old = _guesses(engine.runner.drafter.heads)
    was_frozen = engine.runner.drafter.heads._frozen
    WAYS[way](engine, other)
    engine.llm.reset_prefix_cache()
    said = engine.tokens(prompts, params)
    found = engine.runner.drafter.heads
    fresh = load_heads(heads)
    fresh = fresh.to(next(found.parameters()).dtype)
    fresh.bind(*_matrices(engine.runner.model))
    fresh.freeze()
    return {
        "differ": before != said,
        "right": said == truth,
        "old": old,
        "guesses": _guesses(found),
        "wanted": _guesses(fresh),
        "frozen": (was_frozen is not None, found._frozen is not None),
        "is draft model": engine.runner.get_draft_model() is found,
        "report": engine.runner.medusa_report(),
    }


@torch.inference_mode()
def _guesses(heads: MedusaHeads) -> Any:
    """What heads say about a few rows, in which every one of their weights and the target's has a say."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, heads.config.hidden_size, generator=generator).to(next(heads.parameters()).dtype)
    tokens, probabilities = heads.candidates(hidden, torch.tensor([5, 9, 33]), heads.config.top_k)
    return tokens.tolist(), probabilities.tolist()
