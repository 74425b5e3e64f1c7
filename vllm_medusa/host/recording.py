"""A vLLM worker that writes down each hidden row while the target generates, so that training needs no second pass.

Use:  LLM(model, worker_cls="vllm_medusa.host.recording.RecordingWorker", async_scheduling=False)
      llm.collective_rpc("start_recording", kwargs={"folder": "rows"})  …  llm.collective_rpc("finish_recording")

The row recorded with a token is the one that produced it: after the final norm, before the unembedding, which is
what the heads read when they draft behind that token. Model Runner V1 only (VLLM_USE_V2_MODEL_RUNNER=0): there the
step's rows lie in `execute_model_state` between `execute_model` and `sample_tokens`.
"""

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.outputs import ModelRunnerOutput

from vllm_medusa.training.hidden import RowWriter

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as HostWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as HostWorker


class RecordingWorker(HostWorker):
    """The platform's worker; between start_recording and finish_recording it appends every emitted token's row."""

    _writer: RowWriter | None = None

    def start_recording(self, folder: str) -> None:
        """Open a new store in `folder`; requests are numbered in the order in which they first emit."""
        if self.use_v2_model_runner:
            raise RuntimeError("recording hidden rows needs Model Runner V1: set VLLM_USE_V2_MODEL_RUNNER=0")
        self._writer = RowWriter(Path(folder), self.model_config.get_hidden_size())
        self._numbers: dict[str, int] = {}

    def finish_recording(self) -> list[str]:
        """Close the store; returns the request ids, so that number i in the store is the i-th of them."""
        assert self._writer is not None, "start_recording first"
        self._writer.close()
        self._writer = None
        return list(self._numbers)

    def end_with(self, owner: int) -> None:
        """End this engine's processes when the process `owner` is gone, however it went.

        The host's processes outlive a front end that was killed, and finish what they were asked.
        """
        if owner != os.getpid():
            threading.Thread(target=_end_with, args=(owner, os.getppid()), daemon=True).start()

    def time_steps(self, sizes: Sequence[int]) -> list[float]:
        """Seconds of a step of so many tokens, the best of five: the target's forward pass and its unembedding.

        Attention over a cache, sampling and bookkeeping are missing from it.
        """
        return [min(self._time_step(size) for _ in range(5)) for size in sizes]

    @torch.inference_mode()
    def _time_step(self, tokens: int) -> float:
        began = time.perf_counter()
        hidden, _ = self.model_runner._dummy_run(tokens, randomize_inputs=True)
        self.model_runner.model.compute_logits(hidden[:tokens]).sum().item()  # waits for a GPU
        return time.perf_counter() - began

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample as the host does, then append (request, position, token, row) for each token emitted."""
        state = self.model_runner.execute_model_state
        output = super().sample_tokens(grammar_output)
        if self._writer is not None and state is not None and isinstance(output, ModelRunnerOutput):
            self._append(self._writer, output, state.sample_hidden_states)
        return output

    def _append(self, writer: RowWriter, output: ModelRunnerOutput, hidden: Any) -> None:
        # One row per request in batch order (no speculation here); a partial prefill emits nothing and is skipped.
        emitting = [row for row, tokens in enumerate(output.sampled_token_ids) if tokens]
        ids = [output.req_ids[row] for row in emitting]
        requests = self.model_runner.requests
        writer.append(
            sequences=[self._numbers.setdefault(name, len(self._numbers)) for name in ids],
            positions=[len(requests[name].output_token_ids) - 1 for name in ids],
            tokens=[output.sampled_token_ids[row][0] for row in emitting],
            hidden=hidden[emitting],
        )


def _end_with(owner: int, parent: int) -> None:
    while _is_alive(owner):
        time.sleep(0.5)
    if parent != owner and os.getppid() == parent:  # the engine core; else whoever adopted us
        os.kill(parent, signal.SIGKILL)
    os._exit(1)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's by now? still there
        pass
    return True
