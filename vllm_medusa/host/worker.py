"""The worker of a Medusa engine: the host's own, which builds our runner."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker import cpu_worker

from vllm_medusa.errors import MedusaError
from vllm_medusa.host.compat import find_problems, full_contract


class MedusaCPUWorker(cpu_worker.CPUWorker):
    """The host's CPU worker with trees."""

    def init_device(self) -> None:
        """Let the host build its runner by the name it uses, with our class under that name while it does."""
        problems = find_problems(full_contract())
        if problems:
            raise MedusaError("medusa: this vLLM cannot run Medusa trees: " + "; ".join(problems))
        if self.use_v2_model_runner:
            raise MedusaError("medusa: the host chose Model Runner V2; set VLLM_USE_V2_MODEL_RUNNER=0")
        from vllm_medusa.host.v1.runner import MedusaCPUModelRunner

        original = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = MedusaCPUModelRunner
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = original

    def compile_or_warm_up_model(self) -> Any:
        """The host's warm-up, then a short measurement: what a step costs by its tokens."""
        times = super().compile_or_warm_up_model()
        self.model_runner.measure_step_cost()
        self.model_runner.log_choices()
        return times

    def medusa_report(self, reset: bool = False, log: bool = False) -> dict[str, Any]:
        """Figures since the last reset, by `llm.collective_rpc("medusa_report")`; `log`: in one log line too."""
        report: dict[str, Any] = self.model_runner.medusa_report(reset)
        if log:
            self.model_runner.log_report(report)
        return report
