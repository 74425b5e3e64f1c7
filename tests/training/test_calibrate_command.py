"""`vllm-medusa calibrate` with a real engine on a tiny random model: answers, step times, a config, a picture."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_llama import make_llama

from vllm_medusa.heads.checkpoint import read_config, save_heads
from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.training.calibration_run import STEP_SIZES

VOCAB, HIDDEN = 160, 64


@pytest.mark.slow
def test_calibrate_from_the_command_line(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "max_position_embeddings": 512, "initializer_range": 0.02}
    make_llama(seed=3, **sizes, tie_word_embeddings=True, dtype="bfloat16").save_pretrained(tmp_path / "model")
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(tmp_path / "model")
    heads = MedusaHeads(HeadsConfig(num_heads=2, num_layers=1, hidden_size=HIDDEN, vocab_size=VOCAB, top_k=5))
    folder = save_heads(heads, tmp_path / "heads")
    prompts = [json.dumps({"prompt": f"w{number} w{number + 1} w{2 * number}"}) for number in range(30)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts))
    command = [sys.executable, "-m", "vllm_medusa.cli", "calibrate", "--model", str(tmp_path / "model")]
    command += ["--heads", str(folder), "--prompts", str(tmp_path / "prompts.jsonl"), "--max-tokens", "20"]
    command += ["--num-speculative-tokens", "7", "--out", str(tmp_path / "all.png"), "--json", str(tmp_path / "a.json")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "head 2" in result.stdout and "fastest here" in result.stdout
    calibration = read_config(folder).calibration
    assert calibration is not None and calibration.rows is not None
    assert 30 * 10 < calibration.rows <= 30 * 20  # some answers end by themselves
    assert calibration.num_speculative_tokens["cpu"] == 7
    report = json.loads((tmp_path / "a.json").read_text())
    assert report["calibration"] == calibration.model_dump(mode="json", exclude_none=True)
    assert [row["tokens"] for row in report["step_cost"]] == list(STEP_SIZES)
    assert all(row["milliseconds"] > 0 for row in report["step_cost"])
    assert (tmp_path / "all.png").stat().st_size > 10_000
