"""Heads that others wrote, served as they are: a padded FasterDecoding pickle in half precision on a padded target."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


@pytest.mark.slow
def test_the_target_says_the_same(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    config = LlamaConfig(
        vocab_size=VOCAB,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.35,
        tie_word_embeddings=False,
        dtype="float32",
        **sizes,
    )
    llama = LlamaForCausalLM(config).eval()
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
    arguments = [str(tmp_path / "model"), str(heads), str(TOKENS), json.dumps(PROMPTS)]
    command = [sys.executable, "-c", SERVE, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stderr[-3000:]
    line = next(line for line in result.stdout.splitlines() if line.startswith("ANSWERS"))
    answers = json.loads(line.removeprefix("ANSWERS"))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        whole = torch.tensor([prompt])
        with torch.inference_mode():
            for token in answer:
                logits = llama(whole).logits[0, -1]
                # Two engines in float32: equal but for near ties.
                assert float(logits.max() - logits[token]) < 1e-3
                whole = torch.cat([whole, torch.tensor([[token]])], dim=1)
