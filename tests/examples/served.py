"""A server that runs as a process, seen from a test."""

import subprocess
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass
class Server:
    """A running `vllm serve` and what it has logged."""

    process: "subprocess.Popen[bytes]"
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def family(self) -> list[psutil.Process]:
        """The server's process and all its descendants."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return str(answer.read().decode())
