"""The worker of a Medusa engine on a GPU: the host's own, which builds our runner."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from vllm_medusa.host.compat import CONFIG_CONTRACT, GPU_CONTRACT, METRICS_CONTRACT, SCHEDULER_CONTRACT
from vllm_medusa.host.tree_worker import TreeWorker, check_host


class MedusaGPUWorker(TreeWorker, Worker):
    """The host's GPU worker with trees."""

    def _make_model_runner(self) -> Any:
        """Where the host lets a subclass choose."""
        check_host(self.vllm_config, *CONFIG_CONTRACT, *METRICS_CONTRACT, *SCHEDULER_CONTRACT, *GPU_CONTRACT)
        from vllm_medusa.host.v2.runner import MedusaModelRunnerV2

        return MedusaModelRunnerV2(self.vllm_config, self.device)

    def compile_or_warm_up_model(self) -> Any:
        """Our kernels first, then as on a CPU."""
        self.model_runner.warm_up_trees()
        return super().compile_or_warm_up_model()
