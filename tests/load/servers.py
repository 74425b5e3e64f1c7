"""`vllm serve` as a process of its own, plain or with heads."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

START_SECONDS = 300.0
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


@dataclass
class Serving:
    """A server that runs."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def family(self) -> list[psutil.Process]:
        """The server's process and all its descendants."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def engine_process(self) -> psutil.Process:
        """The process of the engine core."""
        found = [process for process in self.family() if "EngineCore" in "".join(process.cmdline())]
        assert len(found) == 1, [process.cmdline() for process in self.family()]
        return found[0]

    def memory(self) -> int:
        """Bytes that the family holds, shared pages counted once."""
        return sum(process.memory_full_info().pss for process in self.family())

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return str(answer.read().decode())

    def samples(self, name: str, label: str) -> dict[str, float]:
        """A metric's values, summed over all labels but this one."""
        totals: dict[str, float] = defaultdict(float)
        for line in self.get("/metrics").splitlines():
            if line.startswith(name + "{"):
                found = re.search(rf'{label}="([^"]*)"', line)
                totals[found.group(1) if found else ""] += float(line.split()[-1])
        return totals

    def running(self) -> float:
        """Requests that the engine has, waiting ones too."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        return sum(sum(self.samples(name, "engine").values()) for name in names)

    def wait_until_idle(self, seconds: float = 60.0) -> None:
        """Until no request runs or waits."""
        end = time.monotonic() + seconds
        while self.running():
            assert time.monotonic() < end, "requests are left in the engine"
            time.sleep(0.2)


@contextmanager
def serve(model: str, heads: str | None, folder: Path, blocks: int) -> Iterator[Serving]:
    """`vllm serve` in float32 with `blocks` KV blocks, its log in `folder`; killed, whatever happens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    template = folder / "template.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    options = ["--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    options += ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "12", "--block-size", "32"]
    options += ["--num-gpu-blocks-override", str(blocks), "--chat-template", str(template)]
    if heads is not None:
        options += ["--speculative-config", json.dumps({"method": "medusa", "model": heads})]
    command = [str(Path(sys.executable).with_name("vllm")), "serve", model, *options]
    log = folder / "log.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ)
    server = Serving(process, f"http://127.0.0.1:{port}", log)
    family: list[psutil.Process] = []
    try:
        _wait_until_healthy(server)
        family = server.family()
        yield server
    finally:
        for member in {*family, *(server.family() if process.poll() is None else ())}:
            if member.is_running():
                member.kill()
        process.wait()


def _wait_until_healthy(server: Serving) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.process.poll() is None:
        try:
            server.get("/health")
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"the server did not come up:\n{server.log.read_text(errors='replace')[-4000:]}")


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
