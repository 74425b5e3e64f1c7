"""Heads trained in miniature for the kinds of models that people serve, by the command, from prompts to serving."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from picture_targets import KINDS, SAVE
from tiny_llama import small_tokenizer
from tiny_targets import save_model

from vllm_medusa.heads.checkpoint import load_heads
from vllm_medusa.heads.target import read_target
from vllm_medusa.training.hidden import HiddenRows
from vllm_medusa.training.served import Comparison

LONG = pytest.mark.skipif(not os.environ.get("MEDUSA_LONG"), reason="an engine in a process of its own, for each kind")
pytestmark = [pytest.mark.slow, LONG]

WITH_PICTURES = [kind for kind in KINDS if kind.values[0] in ("paddleocr_vl", "qwen3_vl")]  # M-RoPE


KINDS_AND_MORE = [
    *((kind, "") for kind in ("mixtral", "gpt_oss", "granite", "cohere", "gemma2")),
    *(pytest.param(*kind.values, "", marks=kind.marks, id=kind.id) for kind in WITH_PICTURES),
    *(("llama", f"--{way}-parallel-size 2") for way in ("tensor", "pipeline")),
]


@pytest.mark.parametrize(("kind", "more"), KINDS_AND_MORE)
def test_from_prompts_to_heads_that_are_right(tmp_path: Path, kind: str, more: str) -> None:
    """Rows are those whose product with the unembedding chose the tokens; the first head learns what comes next."""
    model, out, prompts = tmp_path / "model", tmp_path / "heads", tmp_path / "prompts.jsonl"
    _save(kind, model)
    questions = [f"{word} {number}" for number in range(8) for word in ("red", "green", "blue", "and")]
    prompts.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    command = [
        *(sys.executable, "-m", "vllm_medusa.cli", "train", "--model", model, "--prompts", prompts, "--out", out),
        *("--held-out", "6", "--max-tokens", "4000", "--max-answer-tokens", "160"),
        *("--epochs", "60", "--batch-size", "64"),
        *("--trunk-size", "64", "--num-heads", "2", "--learning-rate", "0.005", "--enforce-eager"),
        *more.split(),
    ]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    run = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=540)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = HiddenRows.open(sorted(path.parent for path in out.with_name("heads-rows").rglob("store.json")))
    target = read_target(model)
    hidden = rows.gather(np.arange(len(rows))).float()
    chosen = target.logits(hidden).argmax(1).numpy() == rows.tokens
    assert len(rows) > 1000
    assert chosen.mean() > 0.95, "in bfloat16 the second best may come out ahead"
    heads = load_heads(out).bfloat16()
    assert heads.config.training is not None
    if "pipeline" in more:  # trees are not served there
        assert "pipeline" in heads.config.training["served"]["failed"]
    else:
        served = Comparison(**heads.config.training["served"])
        assert served.agrees and f"{served.served:.2f} tokens a step in vLLM" in (out / "README.md").read_text()
    heads.bind(*target.to("cpu", torch.bfloat16).matrices)
    guesses, _ = heads.candidates(hidden.bfloat16(), torch.from_numpy(rows.tokens.astype(np.int64)), 1)
    wanted = rows.targets(1)[:, 0]
    right = (guesses[:, 0, 0].numpy() == wanted)[wanted >= 0].mean()
    # Answers of random weights do not repeat themselves, so this is about rows that were learnt from.
    assert right > 4 * np.bincount(rows.tokens).max() / len(rows), "hardly better than the commonest token"


def _save(kind: str, folder: Path) -> None:
    if kind in SAVE:
        SAVE[kind](folder)
        return
    tokenizer = small_tokenizer("red green blue and red and blue, 12 345 6789 {} ", 300)
    tokenizer.save_pretrained(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    save_model(kind, folder, vocab_size=len(tokenizer), max_position_embeddings=4096, **ends)
