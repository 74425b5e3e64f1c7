"""The worker of a Medusa engine on a GPU: the host's own, which builds our runner."""

from __future__ import annotations

from typing import Any

from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu_worker import Worker

from vllm_medusa.host.compat import CONFIG_CONTRACT, GPU_CONTRACT, METRICS_CONTRACT, SCHEDULER_CONTRACT
from vllm_medusa.host.startup import logger
from vllm_medusa.host.tree_worker import TreeWorker, check_host


class MedusaGPUWorker(TreeWorker, Worker):
    """The host's GPU worker with trees."""

    def _make_model_runner(self) -> Any:
        """Where the host lets a subclass choose."""
        contract = (*CONFIG_CONTRACT, *METRICS_CONTRACT, *SCHEDULER_CONTRACT, *GPU_CONTRACT)
        if check_host(self.vllm_config, *contract) == "V2":
            from vllm_medusa.host.v2.runner import MedusaModelRunnerV2

            return MedusaModelRunnerV2(self.vllm_config, self.device)
        from vllm_medusa.host.v1.runner import MedusaModelRunnerV1

        cut_at_attention(self.vllm_config.compilation_config)
        return MedusaModelRunnerV1(self.vllm_config, self.device)

    def compile_or_warm_up_model(self) -> Any:
        """Our kernels first, then as on a CPU."""
        self.model_runner.warm_up_trees()
        logger.warning(
            "Medusa: our kernels agree with plain arithmetic on this GPU, but nobody has measured trees on one yet; "
            "in a clone, make gpu-e2e compares whole answers with plain vLLM's."
        )
        return super().compile_or_warm_up_model()


def cut_at_attention(compilation: Any) -> None:
    """On Model Runner V1 trees come from the host, so no CUDA graph may hold attention: cut graphs there, or none."""
    mode = compilation.cudagraph_mode
    if mode is not None and mode.has_full_cudagraphs():
        cut = compilation.splitting_ops_contain_attention()
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE if cut else CUDAGraphMode.NONE
