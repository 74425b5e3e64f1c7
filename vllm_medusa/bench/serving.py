"""The child process that is one `vllm serve`: `python -m vllm_medusa.bench.serving FD`.

Its first command says what to serve; then it is vLLM's own command line with those arguments, ended by SIGTERM when
its input ends. It says one "result" when it hands over to vLLM; from then on it is asked by HTTP.
"""

import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from vllm_medusa.bench.child import Commands, Say, serve_parent, use_exported_heads


def serve_arguments(engine: Mapping[str, Any], port: int) -> list[str]:
    """What follows `vllm` on its command line, for the keyword arguments that `vllm.LLM` would get.

    The generation defaults are vLLM's, as they are offline; the model's own might ask for sampling.

    >>> serve_arguments({"model": "m", "seed": 0, "enforce_eager": True, "speculative_config": None}, 8000)[:7]
    ['serve', 'm', '--host', '127.0.0.1', '--port', '8000', '--served-model-name']
    """
    arguments = ["serve", engine["model"], "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--served-model-name", "model", "--generation-config", "vllm", "--disable-uvicorn-access-log"]
    for key, value in engine.items():
        option = key.replace("_", "-")
        match value:
            case _ if key == "model" or value is None:
                continue
            case bool():
                arguments.append(f"--{option}" if value else f"--no-{option}")
            case dict():
                arguments += [f"--{option}", json.dumps(value)]
            case _:
                arguments += [f"--{option}", str(value)]
    return arguments


def _serve(commands: Commands, say: Say) -> None:
    start = commands.get()
    if start is None:
        return
    if start["export_to"]:
        say("stage", text="writing the heads in vLLM's format")
        use_exported_heads(start["engine"], start["export_to"])
    say("stage", text="importing vLLM")
    from vllm.entrypoints.cli.main import main

    from vllm_medusa.host.positions import served_length

    length = served_length(start["engine"]["model"], start["engine"]["max_model_len"])
    sys.argv = ["vllm", *serve_arguments({**start["engine"], "max_model_len": length}, start["port"])]
    say("result", value=length)
    main()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)  # until vLLM sets its own: an end while it starts is an orderly one too
    serve_parent(_serve, stop=lambda: os.kill(os.getpid(), signal.SIGTERM))
