"""The worker of a Medusa engine on a CPU: the host's own, which builds our runner."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker import cpu_worker

from vllm_medusa.host.choice import Runner
from vllm_medusa.host.compat import full_contract
from vllm_medusa.host.tree_worker import TreeWorker, check_host


class MedusaCPUWorker(TreeWorker, cpu_worker.CPUWorker):
    """The host's CPU worker with trees."""

    def init_device(self) -> None:
        """Let the host build its runner by the name it uses, with our class under that name while it does."""
        owner, ours = _our_runner(check_host(self.vllm_config, *full_contract()))
        original = owner.CPUModelRunner
        owner.CPUModelRunner = ours
        try:
            super().init_device()
        finally:
            owner.CPUModelRunner = original


def _our_runner(runner: Runner) -> tuple[Any, type]:
    """The module in which the host looks up its runner's class, and our subclass of it."""
    if runner == "V2":
        from vllm.v1.worker.cpu import model_runner

        from vllm_medusa.host.v2.runner import MedusaCPUModelRunnerV2

        return model_runner, MedusaCPUModelRunnerV2
    from vllm_medusa.host.v1.cpu_runner import MedusaCPUModelRunner

    return cpu_worker, MedusaCPUModelRunner
