"""Heads across engines: what others wrote served by us, and what we convert served by vLLM itself."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import make_llama

from vllm_medusa.heads.checkpoint import save_heads
from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.heads.conversion import convert
from vllm_medusa.heads.model import MedusaHeads

VOCAB, HIDDEN, TOKENS = 150, 64, 24  # vLLM keeps 192 rows of it
PROMPTS = [[5, 9, 33], [7] * 20, list(range(3, 90))]
SERVE = """
import json, sys
from vllm import LLM, SamplingParams

llm = LLM(
    sys.argv[1], dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=256, block_size=32,
    speculative_config={"method": "medusa", "model": sys.argv[2], "num_speculative_tokens": 12},
)
params = SamplingParams(temperature=0.0, max_tokens=int(sys.argv[3]), ignore_eos=True, detokenize=False)
prompts = [{"prompt_token_ids": ids} for ids in json.loads(sys.argv[4])]
outputs = llm.generate(prompts, params, use_tqdm=False)
llm.collective_rpc("medusa_report")  # only our worker knows this
print("ANSWERS", json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


NATIVE = """
import json, sys
from vllm import LLM, SamplingParams

llm = LLM(
    sys.argv[1], dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=256,
    disable_log_stats=False, speculative_config={"method": "medusa", "model": sys.argv[2], "num_speculative_tokens": 3},
)
params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, detokenize=False)
llm.generate([{"prompt_token_ids": [60, 61, 70]}], params, use_tqdm=False)
counters = [metric for metric in llm.get_metrics() if "spec_decode" in metric.name and hasattr(metric, "value")]
print("COUNTS", json.dumps({metric.name: metric.value for metric in counters}))
"""


def run(script: str, mark: str, *arguments: object, **environment: str) -> Any:
    """The JSON behind `mark` that a script prints in a process of its own."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400, env=os.environ | environment)
    assert result.returncode == 0, result.stderr[-3000:]
    line = next(line for line in result.stdout.splitlines() if line.startswith(mark))
    return json.loads(line.removeprefix(mark))


@pytest.mark.slow
def test_vllm_itself_serves_what_we_convert(tmp_path: Path) -> None:
    """A target that repeats its token, and heads that say so: vLLM must accept every guess."""
    llama = make_llama(seed=11, vocab_size=VOCAB, hidden_size=HIDDEN, initializer_range=0.02)
    llama.lm_head.weight.data.copy_(llama.model.embed_tokens.weight.data)
    llama.model.embed_tokens.weight.data.mul_(10)
    llama.save_pretrained(tmp_path / "model")
    config = HeadsConfig(num_heads=3, num_layers=1, hidden_size=HIDDEN, vocab_size=VOCAB, draft_vocab_size=100)
    heads = MedusaHeads(config)
    assert heads.token_map is not None
    heads.token_map.copy_(torch.arange(VOCAB - 1, VOCAB - 101, -1))
    save_heads(heads, tmp_path / "ours")
    convert(str(tmp_path / "ours"), tmp_path / "vllm", "vllm", str(tmp_path / "model"))
    counts = run(NATIVE, "COUNTS", tmp_path / "model", tmp_path / "vllm", VLLM_PLUGINS="medusa_wheel_name")
    assert counts["vllm:spec_decode_num_accepted_tokens"] == counts["vllm:spec_decode_num_draft_tokens"] >= 12


@pytest.mark.slow
def test_a_padded_pickle_in_half_precision_serves_on_a_padded_target(tmp_path: Path) -> None:
    llama = make_llama(seed=11, vocab_size=VOCAB, hidden_size=HIDDEN)
    llama.save_pretrained(tmp_path / "model")
    heads = tmp_path / "heads"
    heads.mkdir()
    (heads / "config.json").write_text(json.dumps({"medusa_num_heads": 5}))
    state = {}
    for head in range(3):
        state[f"{head}.0.linear.weight"] = 0.1 * torch.randn(HIDDEN, HIDDEN).half()
        state[f"{head}.0.linear.bias"] = torch.zeros(HIDDEN).half()
        # Rows behind the vocabulary win every guess where they are not left out.
        own = torch.cat([llama.lm_head.weight.detach(), torch.full((192 - VOCAB, HIDDEN), 9.0)])
        state[f"{head}.1.weight"] = own.half()
    torch.save(state, heads / "medusa_lm_head.pt")
    answers = run(SERVE, "ANSWERS", tmp_path / "model", heads, TOKENS, json.dumps(PROMPTS))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        whole = torch.tensor([prompt])
        with torch.inference_mode():
            for token in answer:
                logits = llama(whole).logits[0, -1]
                # Two engines in float32: equal but for near ties.
                assert float(logits.max() - logits[token]) < 1e-3
                whole = torch.cat([whole, torch.tensor([[token]])], dim=1)
