"""The child process that owns one vLLM engine: `python -m vllm_medusa.bench.driver FD`.

It reads one JSON command a line from its standard input and answers with JSON lines on file descriptor FD; what vLLM
prints goes to its standard output, which the parent sends to a log file.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vllm_medusa.bench.child import Commands, Say, serve_parent, use_exported_heads
from vllm_medusa.bench.measurement import Measurement
from vllm_medusa.bench.peers import has_report

PROGRESS_SECONDS = 0.2


class Driver:
    """One engine and the commands it understands: `run`, `decode`."""

    def __init__(self, engine: Mapping[str, Any], say: Say) -> None:
        """`engine`: keyword arguments of `vllm.LLM`; `say(event, **data)` writes a line to the parent."""
        self._say = say
        from vllm import LLM

        from vllm_medusa.host.positions import served_length

        length = served_length(engine["model"], engine["max_model_len"])
        say("stage", text="starting the engine")
        # With the counters of drafted tokens.
        self._llm = LLM(**{**engine, "max_model_len": length}, disable_log_stats=False)
        self._tokenizer: Any = self._llm.get_tokenizer()
        self._reports = has_report(engine.get("speculative_config"))

    def facts(self) -> dict[str, Any]:
        """What the parent wants to know about the engine for the provenance."""
        config = self._llm.llm_engine.vllm_config
        return {
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "compiled": not _is_eager(config),
            "max_model_len": config.model_config.max_model_len,
        }

    def run(self, prompts: Sequence[str], batch_size: int, sampling: Mapping[str, Any]) -> Measurement:
        """Answer the prompts with `batch_size` of them in flight: a new one starts as soon as one ends."""
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

    def lengths(self, prompts: Sequence[str]) -> list[int]:
        """The number of tokens of each prompt, in its chat template if there is one."""
        return [len(self._encode(prompt)) for prompt in prompts]

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
                    answer = outputs[int(output.request_id)]
                    request_steps += bool(answer)  # the first one comes with the prompt
                    answer.extend(new)
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


def _drive(commands: Commands, say: Say) -> None:
    start = commands.get()
    if start is None:
        return
    began = time.perf_counter()
    say("stage", text="importing vLLM")
    if start["export_to"]:
        use_exported_heads(start["engine"], start["export_to"])
    driver = Driver(start["engine"], say)
    try:
        say("result", value={"start_seconds": time.perf_counter() - began, **driver.facts()})
        while (command := commands.get()) is not None:
            match command.pop("do"):
                case "run":
                    say("result", value=asdict(driver.run(**command)))
                case "lengths":
                    say("result", value=driver.lengths(**command))
                case "decode":
                    say("result", value=driver.decode(**command))
    finally:
        driver.close()


if __name__ == "__main__":
    serve_parent(_drive)
