"""The child process that owns one vLLM engine: `python -m vllm_medusa.bench.driver FD`.

It reads one JSON command a line from its standard input and answers with JSON lines on file descriptor FD; what vLLM
prints goes to its standard output, which the parent sends to a log file. When the input ends, so does the process: an
engine never outlives the bench that started it.
"""

import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn, TextIO

PROGRESS_SECONDS = 0.2
END_SECONDS = 15.0


@dataclass
class Measurement:
    """What one run over a list of prompts gave. `outputs[i]` are the tokens that answer prompt i."""

    seconds: float
    steps: int
    request_steps: int
    outputs: list[list[int]] = field(default_factory=list)
    drafted_nodes: int | None = None
    report: dict[str, Any] | None = None  # Medusa's own report, where the method has one


class Driver:
    """One engine and the commands it understands: `run`, `decode`."""

    def __init__(self, engine: Mapping[str, Any], say: Callable[..., None]) -> None:
        """`engine`: keyword arguments of `vllm.LLM`; `say(event, **data)` writes a line to the parent."""
        self._say = say
        from vllm import LLM

        say("stage", text="starting the engine")
        self._llm = LLM(**engine)
        self._tokenizer: Any = self._llm.get_tokenizer()
        speculative = engine.get("speculative_config") or {}
        self._reports = speculative.get("method") == "medusa" and "tree" in speculative

    def facts(self) -> dict[str, Any]:
        """What the parent wants to know about the engine for the provenance."""
        config = self._llm.llm_engine.vllm_config
        return {"dtype": str(config.model_config.dtype).removeprefix("torch."), "compiled": not _is_eager(config)}

    def run(self, prompts: Sequence[str], batch_size: int, sampling: Mapping[str, Any]) -> Measurement:
        """Answer the prompts with `batch_size` of them in flight: a new one starts as soon as one ends.

        A request step is one step in which one request got tokens, so tokens / request steps is the mean accepted
        length of any method, the bonus token counted.
        """
        rows = [self._encode(prompt) for prompt in prompts]
        self._medusa_report()
        drafted_before = self._drafted_tokens()
        measurement = self._closed_loop(rows, batch_size, sampling)
        measurement.report = self._medusa_report()
        if measurement.report is not None:
            measurement.drafted_nodes = measurement.report["drafted_nodes"]
        else:
            measurement.drafted_nodes = self._drafted_tokens() - drafted_before
        return measurement

    def decode(self, tokens: Sequence[int]) -> list[str]:
        """Each token's text, for drawing trees."""
        return [self._tokenizer.decode([token]) for token in tokens]

    def close(self) -> None:
        """End vLLM's processes; Python would wait for them at its exit without having told them."""
        self._llm.llm_engine.engine_core.shutdown()

    def _closed_loop(self, rows: Sequence[list[int]], batch_size: int, sampling: Mapping[str, Any]) -> Measurement:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self._llm.llm_engine
        outputs: list[list[int]] = [[] for _ in rows]
        waiting = deque(range(len(rows)))
        running = steps = request_steps = finished = 0
        said = started = time.perf_counter()
        while waiting or running:
            while waiting and running < batch_size:
                index = waiting.popleft()
                params = SamplingParams(**sampling, output_kind=RequestOutputKind.DELTA)
                if params.temperature > 0:
                    params.seed = index  # the same noise for every method, so that outputs can be compared
                engine.add_request(str(index), {"prompt_token_ids": rows[index]}, params)
                running += 1
            progressed = False
            for output in engine.step():
                new = output.outputs[0].token_ids
                if new:
                    outputs[int(output.request_id)].extend(new)
                    request_steps += 1
                    progressed = True
                if output.finished:
                    running -= 1
                    finished += 1
            steps += progressed
            now = time.perf_counter()
            if now - said > PROGRESS_SECONDS:
                said = now
                self._say("progress", finished=finished, tokens=sum(map(len, outputs)))
        return Measurement(time.perf_counter() - started, steps, request_steps, outputs)

    def _encode(self, prompt: str) -> list[int]:
        if getattr(self._tokenizer, "chat_template", None):
            text = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        return list(self._tokenizer.encode(prompt))

    def _medusa_report(self) -> dict[str, Any] | None:
        if not self._reports:
            return None
        return self._llm.collective_rpc("medusa_report", kwargs={"reset": True})[0]

    def _drafted_tokens(self) -> int:
        for metric in self._llm.get_metrics():
            if metric.name == "vllm:spec_decode_num_draft_tokens":
                return int(metric.value)
        return 0


def _is_eager(config: Any) -> bool:
    return bool(config.model_config.enforce_eager)


def _use_exported_heads(engine: dict[str, Any], folder: Path) -> None:
    """Let vLLM's own Medusa load our heads, written in its format into `folder`."""
    from vllm_medusa.bench.native import export_heads

    speculative = engine["speculative_config"]
    speculative["num_speculative_tokens"] = export_heads(speculative["model"], engine["model"], folder)
    speculative["model"] = str(folder)


def _listen(lines: TextIO, commands: "SimpleQueue[dict[str, Any] | None]") -> None:
    """Queue the parent's commands, None at the end. Whoever is still busy a while after the end is killed.

    Runs in a thread, so that the end is seen in the middle of a run too, when the parent has been killed.
    """
    for line in lines:
        commands.put(json.loads(line))
    commands.put(None)
    time.sleep(END_SECONDS)
    _end()


def _end() -> NoReturn:
    """End this process with vLLM's engine and workers, which otherwise may outlive an engine that was interrupted."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getpgrp() == os.getpid():  # the group is ours alone
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def main() -> None:
    """Start the engine that the first command describes, then obey until the input ends."""
    answers = open(int(sys.argv[1]), "w", encoding="utf-8", buffering=1)  # noqa: SIM115 (lives as long as we do)

    def say(event: str, **data: Any) -> None:
        print(json.dumps({"event": event, **data}), file=answers)

    commands: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin, commands), daemon=True).start()
    try:
        _serve(commands, say)
    except Exception as error:  # noqa: BLE001 (told to the parent, whatever it is)
        traceback.print_exc()
        with suppress(BrokenPipeError):  # nobody may be left to hear it
            say("error", kind=type(error).__name__, message=str(error))
    _end()


def _serve(commands: "SimpleQueue[dict[str, Any] | None]", say: Callable[..., None]) -> None:
    start = commands.get()
    if start is None:
        return
    began = time.perf_counter()
    say("stage", text="importing vLLM")
    with tempfile.TemporaryDirectory(prefix="vllm-medusa-native-") as folder:  # needed until the heads are loaded
        if start["export_heads"]:
            _use_exported_heads(start["engine"], Path(folder))
        driver = Driver(start["engine"], say)
    try:
        say("result", value={"start_seconds": time.perf_counter() - began, **driver.facts()})
        while (command := commands.get()) is not None:
            match command.pop("do"):
                case "run":
                    say("result", value=asdict(driver.run(**command)))
                case "decode":
                    say("result", value=driver.decode(**command))
    finally:
        driver.close()


if __name__ == "__main__":
    main()
