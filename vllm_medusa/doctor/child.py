"""The self-check's own process: vLLM plain and with trees on the same prompts, what they said into a file.

    python -m vllm_medusa.doctor.child FOLDER

FOLDER/task.json may name a pair of `model` and `heads` that vLLM is asked to accept; FOLDER/answer.json is written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm_medusa.doctor.tiny_pair import ANSWER, MAX_LEN, PROMPTS, write_pair


def try_trees(folder: Path) -> dict[str, Any]:
    """Greedy answers of both engines, and the Medusa engine's figures."""
    from vllm import LLM, SamplingParams

    from vllm_medusa.host.choice import is_ours

    model, heads = write_pair(folder)
    common: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": MAX_LEN,
        "max_num_seqs": len(PROMPTS),
        "block_size": 32,
        "num_gpu_blocks_override": 32,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "seed": 0,
    }
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    prompts: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
    medusa = {"method": "medusa", "model": str(heads), "num_speculative_tokens": 16, "adaptive": False}
    engines = [LLM(**common), LLM(**common, speculative_config=medusa)]  # both are kept: their groups belong together
    if not is_ours(engines[1].llm_engine.vllm_config.speculative_config):
        return {"error": "the plugin was not loaded in vLLM's process: its own Medusa served instead"}
    plain, trees = (
        [list(output.outputs[0].token_ids) for output in engine.generate(prompts, params, use_tqdm=False)]
        for engine in engines
    )
    report = engines[1].collective_rpc("medusa_report")[0]
    kept = ("mean_accepted_length", "drafted_nodes", "request_steps", "emitted_tokens", "kernel")
    return {"plain": plain, "trees": trees, **{name: report[name] for name in kept}}


def accept_pair(model: str, heads: str) -> str:
    """What vLLM says against serving this pair, before any weights load; "" if nothing."""
    from vllm.engine.arg_utils import EngineArgs

    speculative = {"method": "medusa", "model": heads}
    try:
        EngineArgs(model=model, speculative_config=speculative).create_engine_config()
    except Exception as error:  # noqa: BLE001 (whatever the host says against a model is what we came for)
        return f"{type(error).__name__}: {error}"
    return ""


def main(folder: Path) -> None:
    """Do what the task asks, and write the answer at once."""
    task = json.loads((folder / "task.json").read_text())
    answer: dict[str, Any] = {}
    if task["model"] is not None:
        answer["refusal"] = accept_pair(task["model"], task["heads"])
    try:
        answer |= try_trees(folder)
    except Exception as error:  # noqa: BLE001 (an engine that does not start is a finding)
        answer["error"] = f"{type(error).__name__}: {error}"
    partial = folder / "answer.partial"
    partial.write_text(json.dumps(answer))
    partial.rename(folder / "answer.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
