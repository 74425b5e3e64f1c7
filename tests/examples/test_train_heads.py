"""examples/train_heads.py on a tiny random Llama: from no heads at all to a folder that loads."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_llama import save_llama


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    """A random Llama with a tokenizer that knows single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    folder = tmp_path / "model"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    save_llama(folder, seed=3, vocab_size=len(tokens), bos_token_id=0, eos_token_id=1)
    return folder


@pytest.mark.slow
def test_heads_for_a_model_of_ones_own(repository: Path, tmp_path: Path, tiny_model: Path) -> None:
    from vllm_medusa.heads.checkpoint import load_heads

    out = tmp_path / "heads"
    result = subprocess.run(
        [sys.executable, "examples/train_heads.py", str(tiny_model), str(out)],
        cwd=repository,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    found = re.search(r"Learnt from (\d+) tokens.*bring ([\d.]+) tokens", result.stdout, re.DOTALL)
    assert found is not None, result.stdout
    assert int(found[1]) > 500 and 1.0 <= float(found[2]) <= 4.0
    assert f'"model": "{out}"' in result.stdout
    heads = load_heads(out)
    assert (heads.config.num_heads, heads.config.hidden_size, heads.config.base_model) == (3, 64, "model")
    assert (out / "README.md").read_text().count("held-out prompts") >= 1
