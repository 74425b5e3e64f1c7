"""What the workers of Medusa engines have in common, on a CPU and on a GPU."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import vllm
import vllm.envs

from vllm_medusa.config import SETTINGS_KEY
from vllm_medusa.errors import MedusaError
from vllm_medusa.host.choice import Runner, check_runner
from vllm_medusa.host.compat import RUNNER_CONTRACT, V2_CONTRACT, Symbol, find_problems
from vllm_medusa.host.startup import logger
from vllm_medusa.host.statistics import in_one_line
from vllm_medusa.kept import Kept


def check_host(vllm_config: Any, *contract: Symbol) -> Runner:
    """In a worker, before anything is built: the host has what we rely on, `contract` as well; which runner serves.

    Raises:
        MedusaError: it has not, or chose a runner for which settings were not checked.
    """
    runner = check_runner(vllm_config)
    problems = find_problems(contract + (V2_CONTRACT if runner == "V2" else RUNNER_CONTRACT))
    if problems:
        raise MedusaError("medusa: this vLLM cannot run Medusa trees: " + "; ".join(problems))
    return runner


class TreeWorker:
    """What both workers have, beside the host's own methods."""

    model_runner: Any
    vllm_config: Any
    rank: int
    products_in_words: str | None = None  # what multiplies with the target's matrices, where there is a choice
    _are_weights_discarded = False

    @cached_property
    def kept(self) -> Kept:
        """What earlier starts of this target measured on this machine."""
        model, parallel = self.vllm_config.model_config, self.vllm_config.parallel_config
        subject = {
            "vllm": vllm.__version__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "model": model.model,
            "revision": model.revision,
            "dtype": str(model.dtype),
            "quantization": model.quantization,
            "ranks": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size, self.rank],
            "eager": model.enforce_eager,
            "settings": {**self.vllm_config.additional_config[SETTINGS_KEY], "heads": None},
        }
        return Kept(Path(vllm.envs.VLLM_CACHE_ROOT) / "medusa", subject)

    def compile_or_warm_up_model(self) -> Any:
        """The host's warm-up, then a short measurement: what a step costs by its tokens."""
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        self.model_runner.measure_step_cost(self.kept)
        self.model_runner.log_choices(self.products_in_words)
        return times

    def medusa_report(self, reset: bool = False, log: bool = False) -> dict[str, Any]:
        """Figures since the last reset, by `llm.collective_rpc("medusa_report")`; `log`: in one log line too."""
        report: dict[str, Any] = self.model_runner.medusa_report(reset)
        if log:
            logger.info(in_one_line(report))
        return report

    # Weights that change ----------------------------------------------------------------------------------------

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """The host's; the heads are tied to the new weights before they draft again."""
        try:
            super().reload_weights(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.medusa_rebind()

    def finish_weight_update(self) -> None:
        """The same at the end of an update that was sent in pieces."""
        try:
            super().finish_weight_update()  # type: ignore[misc]
        finally:
            self.medusa_rebind()

    def sleep(self, level: int = 1) -> None:
        """The host's; level 2 throws weights away."""
        super().sleep(level)  # type: ignore[misc]
        self._are_weights_discarded |= level >= 2

    def wake_up(self, tags: list[str] | None = None) -> None:
        """The host's, which leaves it to the user to load the target again; the heads are loaded here."""
        super().wake_up(tags)  # type: ignore[misc]
        if self._are_weights_discarded and (tags is None or "weights" in tags):
            self.model_runner.load_heads_again()
            self._are_weights_discarded = False

    def medusa_rebind(self) -> None:
        """Tie the heads to the target's weights anew, by `llm.collective_rpc("medusa_rebind")`.

        For whoever writes into the target's parameters by itself; the host's own ways of new weights, and the
        `load_weights` of the model, lead here anyway.
        """
        self.model_runner.drafter.weights_changed()
