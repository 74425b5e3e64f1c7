"""A vLLM worker that writes down each hidden row while the target generates, so that training needs no second pass.

Use:  LLM(model, worker_cls="vllm_medusa.host.recording.RecordingWorker")
      llm.collective_rpc("start_recording", kwargs={"folder": "rows"})  …  llm.collective_rpc("finish_recording")

The row recorded with a token is the one that produced it: after the final norm, before the unembedding, which is
what the heads read when they draft behind that token. Both model runners leave a step's rows in `execute_model_state`
between `execute_model` and `sample_tokens`. Which place of an answer a row stands for follows from the scheduler's
counts alone, so nothing waits for the tokens: whoever asked knows them, and writes them into the store at the end.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import get_pp_group, get_tp_group
from vllm.platforms import current_platform

from vllm_medusa.training.hidden import RowWriter
from vllm_medusa.training.row_copies import RowCopies
from vllm_medusa.training.said import Said

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as HostWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as HostWorker


class RecordingWorker(HostWorker):
    """The platform's worker; between start_recording and finish_recording every emitted token's row is appended.

    By the one rank that has the rows whole: the first of the last pipeline stage.
    """

    _folder: Path | None = None
    _copies: RowCopies | None = None
    _last: torch.Tensor | None = None

    def start_recording(self, folder: str) -> None:
        """Open a new store in `folder`; requests are numbered in the order in which they first emit."""
        self._folder = Path(folder)
        self._numbers: dict[str, int] = {}
        self._prompts: dict[str, int] = {}
        self._reached: dict[str, int] = {}
        if get_pp_group().is_last_rank and get_tp_group().rank_in_group == 0:
            writer = RowWriter(self._folder, self.model_config.get_hidden_size())
            self._copies = RowCopies(writer, self.device)

    def finish_recording(self) -> list[str]:
        """Close the store.

        Returns:
            The request ids, so that number i in the store is the i-th of them; empty on a rank that did not write.
        """
        assert self._folder is not None, "start_recording first"
        said = self._say()
        folder, copies, self._folder, self._copies = self._folder, self._copies, None, None
        if copies is None:
            return []
        copies.close()
        if said is not None:
            said.save(folder)
        return list(self._numbers)

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

    def execute_model(self, scheduler_output: Any) -> Any:
        """As the host does; which tokens of each request are computed behind this step is noted first."""
        if self._folder is not None:
            self._note(scheduler_output)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As the host does; the rows that are sampled from are on their way into the store first."""
        state = self.model_runner.execute_model_state
        if self._folder is not None and state is not None:
            self._append(*_rows(self.model_runner, state))
        return super().sample_tokens(grammar_output)

    def _note(self, step: Any) -> None:
        scheduled = step.num_scheduled_tokens
        for new in step.scheduled_new_reqs:
            self._prompts.setdefault(new.req_id, len(new.prompt_token_ids or ()))
            self._reached[new.req_id] = new.num_computed_tokens + scheduled[new.req_id]
        known = step.scheduled_cached_reqs
        for name, computed in zip(known.req_ids, known.num_computed_tokens, strict=True):
            self._reached[name] = computed + scheduled[name]

    def _append(self, names: Sequence[str], hidden: torch.Tensor | None) -> None:
        if hidden is None or not names:  # another pipeline stage
            return
        self._last = hidden[:_SAID]
        if self._copies is None:
            return
        # One row per request in batch order. Inside a prompt nothing is emitted; inside an answer that is computed
        # again after a preemption the row is there twice, and one of the two is dropped at the end.
        places = [self._reached[name] - self._prompts[name] for name in names]
        emitting = [row for row, place in enumerate(places) if place >= 0]
        self._copies.append(
            sequences=[self._numbers.setdefault(names[row], len(self._numbers)) for row in emitting],
            positions=[places[row] for row in emitting],
            hidden=hidden if len(emitting) == len(names) else hidden[emitting],
        )

    @torch.inference_mode()
    def _say(self) -> Said | None:
        """What the target makes of the last rows, by vLLM's own layers: every rank of the stage has to take part."""
        rows, self._last = self._last, None
        if rows is None:
            return None
        rounded = rows.to(torch.bfloat16)
        logits = self.model_runner.model.compute_logits(rounded.to(rows.dtype))
        return None if logits is None else Said.of(rounded, logits)


_SAID = 16  # rows of which the target's distribution is kept


def _rows(runner: Any, state: Any) -> tuple[Sequence[str], torch.Tensor | None]:
    """Requests of a step in batch order, and the row that each is sampled from, [B, H]."""
    if hasattr(state, "sample_hidden_states"):  # Model Runner V1
        return list(runner.input_batch.req_ids), state.sample_hidden_states
    hidden = state.hidden_states
    return state.input_batch.req_ids, None if hidden is None else hidden[state.input_batch.logits_indices]
