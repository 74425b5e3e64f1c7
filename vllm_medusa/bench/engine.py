"""The offline engine, `vllm.LLM` in a process of its own: `driver.py` is the other end of its two pipes."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from vllm_medusa.bench.process import EngineProcess, Progress, ignore


class Engine(EngineProcess):
    """One `vllm.LLM`, driven step by step with `batch_size` requests in flight."""

    module = "vllm_medusa.bench.driver"

    def __init__(
        self,
        name: str,
        engine: Mapping[str, Any],
        *,
        environment: Mapping[str, str],
        export_heads: bool = False,
        verbose: bool = False,
    ) -> None:
        """`engine`: keyword arguments of `vllm.LLM`. `export_heads`: write the heads for vLLM's own Medusa first."""
        first = {"engine": dict(engine)}
        super().__init__(name, first, environment=environment, export_heads=export_heads, verbose=verbose)

    def wait_until_ready(self, progress: Progress = ignore) -> Self:
        """Wait for the engine to be up; raises MedusaError with the cause when it does not come up."""
        self.facts = self._result(progress)
        return self

    def run(
        self, prompts: Sequence[str], *, batch_size: int, sampling: Mapping[str, Any], progress: Progress = ignore
    ) -> dict[str, Any]:
        """Answer the prompts; the fields of `measurement.Measurement`."""
        self._send({"do": "run", "prompts": list(prompts), "batch_size": batch_size, "sampling": dict(sampling)})
        return dict(self._result(progress))

    def lengths(self, prompts: Sequence[str]) -> list[int]:
        """The number of tokens of each prompt, as `run` asks for it."""
        self._send({"do": "lengths", "prompts": list(prompts)})
        return list(self._result(ignore))

    def decode(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token."""
        self._send({"do": "decode", "tokens": list(tokens)})
        return list(self._result(ignore))
