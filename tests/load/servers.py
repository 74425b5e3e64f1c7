"""`vllm serve` as a process of its own, plain or with heads."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from served import Server, free_port, served

START_SECONDS = 300.0
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


@contextmanager
def serve(
    model: str,
    heads: str | None,
    folder: Path,
    blocks: int,
    *,
    interpreted: bool = False,
    seconds: float = START_SECONDS,
) -> Iterator[Server]:
    """`vllm serve` in float32 with `blocks` KV blocks, its log in `folder`.

    Args:
        model, heads: that are served; no heads: plain.
        folder: of the log.
        blocks: KV blocks.
        interpreted: on Model Runner V2, by Triton's interpreter.
        seconds: until it must be up.
    """
    port, template = free_port(), folder / "template.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    options = ["--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    options += ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "12", "--block-size", "32"]
    options += ["--num-gpu-blocks-override", str(blocks), "--chat-template", str(template)]
    if heads is not None:
        options += ["--speculative-config", json.dumps({"method": "medusa", "model": heads})]
    command = [Path(sys.executable).with_name("vllm"), "serve", model, *options]
    if interpreted:
        command = [Path(sys.executable), Path(__file__).with_name("interpreted_server.py"), "serve", model, *options]
    with served(command, os.environ, port, folder / "log.txt", seconds) as server:
        yield server


def tiny_speaker(folder: Path) -> tuple[Path, Path]:
    """A random Llama with a tokenizer, and random heads for it: both folders."""
    from tiny_llama import save_llama, save_random_heads, small_tokenizer

    words = "river stone green seven count the light and of north bread window slowly never user assistant"
    tokenizer = small_tokenizer(words, 340)
    model, heads = folder / "model", folder / "heads"
    tokenizer.save_pretrained(model)
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    save_llama(model, seed=3, vocab_size=len(tokenizer), **ends)
    save_random_heads(heads, num_heads=4, num_layers=1, hidden_size=64, vocab_size=len(tokenizer))
    return model, heads
