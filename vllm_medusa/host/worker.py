"""The worker of a Medusa engine: the host's own, which builds our runner."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker import cpu_worker

from vllm_medusa.errors import MedusaError
from vllm_medusa.host.choice import Runner, check_runner
from vllm_medusa.host.compat import V2_CONTRACT, find_problems, full_contract
from vllm_medusa.host.startup import logger
from vllm_medusa.host.statistics import in_one_line


class MedusaCPUWorker(cpu_worker.CPUWorker):
    """The host's CPU worker with trees."""

    def init_device(self) -> None:
        """Let the host build its runner by the name it uses, with our class under that name while it does."""
        runner = check_runner(self.vllm_config)
        problems = find_problems(full_contract() + (V2_CONTRACT if runner == "V2" else ()))
        if problems:
            raise MedusaError("medusa: this vLLM cannot run Medusa trees: " + "; ".join(problems))
        owner, ours = _our_runner(runner)
        original = owner.CPUModelRunner
        owner.CPUModelRunner = ours
        try:
            super().init_device()
        finally:
            owner.CPUModelRunner = original

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
            logger.info(in_one_line(report))
        return report


def _our_runner(runner: Runner) -> tuple[Any, type]:
    """The module in which the host looks up its runner's class, and our subclass of it."""
    if runner == "V2":
        from vllm.v1.worker.cpu import model_runner

        from vllm_medusa.host.v2.runner import MedusaModelRunnerV2

        return model_runner, MedusaModelRunnerV2
    from vllm_medusa.host.v1.runner import MedusaCPUModelRunner

    return cpu_worker, MedusaCPUModelRunner
