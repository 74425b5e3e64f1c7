"""The worker of a Medusa engine on a CPU: the host's own, which builds our runner."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker import cpu_worker

from vllm_medusa.config import SETTINGS_KEY, Settings
from vllm_medusa.host.choice import Runner
from vllm_medusa.host.compat import full_contract
from vllm_medusa.host.linears import ADDITIONAL_KEY, Products
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

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the target with our product in the layers where it is the quicker one."""
        settings = Settings(**self.vllm_config.additional_config[SETTINGS_KEY])
        self.products = Products(settings.linear_product, self.kept)
        with self.products.in_place():
            super().load_model(*args, **kwargs)
        # Compiled graphs call the products, and are kept by what this holds.
        self.vllm_config.additional_config[ADDITIONAL_KEY] = self.products.masks
        self.products_in_words = self.products.in_words()


def _our_runner(runner: Runner) -> tuple[Any, type]:
    """The module in which the host looks up its runner's class, and our subclass of it."""
    if runner == "V2":
        from vllm.v1.worker.cpu import model_runner

        from vllm_medusa.host.v2.runner import MedusaCPUModelRunnerV2

        return model_runner, MedusaCPUModelRunnerV2
    from vllm_medusa.host.v1.cpu_runner import MedusaCPUModelRunner

    return cpu_worker, MedusaCPUModelRunner
