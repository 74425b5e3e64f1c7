"""Model Runner V1 with trees on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_medusa.host.layers import attend_as_cpus_do
from vllm_medusa.host.tree_cache import TreeCache
from vllm_medusa.host.v1.runner import MedusaModelRunnerV1

if TYPE_CHECKING:
    from vllm_medusa.host.v1.device_cache import ScatteredTreeCache


class MedusaCPUModelRunner(MedusaModelRunnerV1, CPUModelRunner):
    """The same over the host's runner for CPUs, whose attention has a cache of its own kind."""

    def _make_cache(self, layers: Any, kv_cache_config: Any) -> TreeCache | ScatteredTreeCache:
        """Adopt the layers; under Triton's interpreter they may be those of a GPU."""
        if attend_as_cpus_do(layers):
            return TreeCache(layers, kv_cache_config)
        return super()._make_cache(layers, kv_cache_config)
