"""The default way to run: engine core and worker in processes of their own, compiled, the plugin loaded by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from engines import MAX_LEN, random_prompts

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
def params_of(regex=None, **fields):
    return SamplingParams(structured_outputs=regex and StructuredOutputsParams(regex=regex), **fields)
if __name__ == "__main__":
    task = json.load(open(sys.argv[1]))
    llm = LLM(**task["llm"])
    prompts = [{"prompt_token_ids": p} for p in task["prompts"]]
    outputs = llm.generate(prompts, [params_of(**fields) for fields in task["params"]], use_tqdm=False)
    answer = {"tokens": [list(o.outputs[0].token_ids) for o in outputs]}
    if "speculative_config" in task["llm"]:
        answer["report"] = llm.collective_rpc("medusa_report", kwargs={"reset": True})[0]
    json.dump(answer, open(sys.argv[2], "w"))
"""


def test_separate_processes(speaker_model, speaker_heads, speaker, tmp_path):
    """Seeded and free requests, and two under a grammar: trees pruned in one process and walked in another."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    prompts = random_prompts(np.random.default_rng(4), [5, 31, 64, 90])
    regex = r"[a-e]{12,20}( and [a-e]{3,9}){3}"
    params = [{"temperature": 0.8, "seed": 3 + i, "max_tokens": 40} for i in range(4)]
    params[1] |= {"regex": regex}
    params[2] |= {"regex": regex, "temperature": 0}
    medusa = {"method": "medusa", "model": str(speaker_heads), "num_speculative_tokens": 12, "adaptive": False}
    llm = {
        "model": str(speaker_model), "dtype": "float32", "max_model_len": MAX_LEN,
        "block_size": 32, "max_num_seqs": 4, "num_gpu_blocks_override": 320,
        "speculative_config": medusa,
    }  # fmt: skip
    task, answer, script = tmp_path / "task.json", tmp_path / "answer.json", tmp_path / "script.py"
    task.write_text(json.dumps({"llm": llm, "prompts": prompts, "params": params}))
    script.write_text(SCRIPT)
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(task), str(answer)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(answer.read_text())
    wanted = [
        SamplingParams(**fields, structured_outputs=rule and StructuredOutputsParams(regex=rule))
        for fields in params
        for rule in [fields.pop("regex", None)]
    ]
    assert found["tokens"] == speaker.tokens(prompts, wanted)
    report = found["report"]
    assert report["drafted_nodes"] > 100 and report["kernel"] in ("c++", "gather")
    assert report["seconds"]["step"] > 0 and report["examples"][0]["parents"]
