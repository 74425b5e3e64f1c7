"""What cannot be served with trees is refused by name before any weights load: settings, and kinds of models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from good_folders import make_ours

from vllm_medusa.errors import MedusaError

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 50, "num_hidden_layers": 1,
    "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64,
}  # fmt: skip
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "pipeline parallelism": ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2: not served with Medusa trees"),
    "decode context parallelism": (
        {"decode_context_parallel_size": 2, "tensor_parallel_size": 2},
        "decode_context_parallel_size=2: not served",
    ),
    "prefill context parallelism": (
        {"prefill_context_parallel_size": 2},
        "prefill_context_parallel_size=2: not served",
    ),
    "dual batch overlap": ({"enable_dbo": True}, "enable_dbo=True: not served with Medusa trees; leave it at False"),
    "micro-batches": ({"ubatch_size": 2}, "ubatch_size=2: not served with Medusa trees; leave it at 0"),
    "a KV cache with a scale for each token": (
        {"kv_cache_dtype": "int8_per_token_head"},
        "kv_cache_dtype='int8_per_token_head': not served with Medusa trees",
    ),
    "KV offloading": ({"kv_offloading_size": 1.0}, "kv_offloading_size=1.0: not served"),
    "prompt embeddings": ({"enable_prompt_embeds": True}, "enable_prompt_embeds=True: not served"),
    "pooling": ({"runner": "pooling"}, "runner='pooling': not served with Medusa trees; leave it at 'generate'"),
    "a scheduler on every rank": (
        {"distributed_executor_backend": "external_launcher"},
        "distributed_executor_backend='external_launcher': it gives every rank a scheduler of its own",
    ),
    "prefill without the rows that nobody reads": (
        {"kv_sharing_fast_prefill": True},
        "kv_sharing_fast_prefill=True: it gives shared layers metadata of rows alone",
    ),
    "experts by token": (
        {"enable_return_routed_experts": True},
        "enable_return_routed_experts=True: vLLM notes experts by the row of a draft",
    ),
    "experts by token, said otherwise": (
        {"aux_output_config": {"enable_return_routed_experts": True}},
        "enable_return_routed_experts=True: vLLM notes experts by the row of a draft",
    ),
    "a worker of somebody's own": ({"worker_cls": "some.Worker"}, "worker_cls='some.Worker': not served"),
    "a scheduler of somebody's own": (
        {"scheduler_cls": "some.Scheduler"},
        "scheduler_cls='some.Scheduler': not served",
    ),
}
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "MLA": (
        {
            "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "kv_lora_rank": 16,
            "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": None,
        },
        "multi-head latent attention (MLA)",
    ),
    "Mamba": (
        {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "state_size": 4, "time_step_rank": 2},
        "recurrent layers",
    ),
    "hybrid": (
        {"model_type": "jamba", "architectures": ["JambaForCausalLM"], "num_hidden_layers": 8, "num_experts": 1},
        "recurrent layers",
    ),
    "encoder and decoder": (
        {
            "model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "d_model": 16,
            "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 1, "decoder_attention_heads": 1,
            "decoder_ffn_dim": 16, "encoder_ffn_dim": 16, "max_target_positions": 64,
        },
        "an encoder and a decoder",
    ),
    "windows that leave prompts in sight": ({"rswa_window": 32}, "windows that leave prompts in sight (R-SWA)"),
    "chunked attention": ({"attention_chunk_size": 32}, "attention in chunks"),
    "ALiBi": (
        {"model_type": "bloom", "architectures": ["BloomForCausalLM"], "n_head": 1, "n_layer": 1},
        "attention by distance (ALiBi)",
    ),
    "a KV cache of 4 bits, by the checkpoint": (
        {
            "quantization_config": {
                "quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 4, "type": "float"}
            }
        },
        "kv_cache_dtype='nvfp4'",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def inspected_here() -> Iterator[None]:
    """The host looks at each kind of model in a process of its own, for ten seconds; here it shall stay in this one."""
    from vllm import ModelRegistry

    before = dict(ModelRegistry.models)
    for config, _ in MODELS.values():
        for architecture in config.get("architectures", ()):
            ModelRegistry.register_model(architecture, before[architecture].load_model_cls())
    yield
    ModelRegistry.models.clear()
    ModelRegistry.models.update(before)


def refusal(folder: Path, config: dict[str, Any], options: dict[str, Any]) -> str:
    """What an engine says that is to serve a model of this config with trees."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_medusa.plugin import register

    register()
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**LLAMA, **config}))
    speculative = {"method": "medusa", "model": str(make_ours(folder / "heads"))}
    args = EngineArgs(model=str(model), skip_tokenizer_init=True, speculative_config=speculative, **options)
    with pytest.raises(MedusaError) as caught:
        args.create_engine_config()
    return str(caught.value)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str, tmp_path: Path) -> None:
    options, says = SETTINGS[name]
    assert says in refusal(tmp_path, {}, options)


def test_kv_connectors(tmp_path: Path) -> None:
    from vllm.config import KVTransferConfig

    given = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    assert "kv_transfer_config=KVTransferConfig(" in refusal(tmp_path, {}, {"kv_transfer_config": given})


@pytest.mark.parametrize("name", MODELS)
def test_kinds_of_models(name: str, tmp_path: Path) -> None:
    config, says = MODELS[name]
    message = refusal(tmp_path, config, {})
    assert says in message and message.startswith("medusa: ")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 2},
        {"enable_lora": True, "max_num_seqs": 16},
        {"kv_cache_dtype": "auto"},
        {"kv_cache_dtype": "fp8_e5m2"},
    ],
    ids=["plain", "tensor parallel", "data parallel", "LoRA", "KV cache", "float8 KV cache"],
)
def test_what_is_served_is_not_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="nothing was refused"):
        try:
            refusal(tmp_path, {}, options)
        except pytest.fail.Exception:
            raise AssertionError("nothing was refused") from None
