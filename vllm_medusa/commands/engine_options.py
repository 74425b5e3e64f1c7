"""Options of `vllm serve` behind those of a command of ours: handed on to vLLM as it spells them."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from vllm_medusa.commands.page import PageCommand
from vllm_medusa.errors import MedusaError

# Whatever a command line holds that is no option of the command's own.
_left: ContextVar[tuple[str, ...]] = ContextVar("left", default=())
SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}
_OURS = {
    "model": "give it as --model of this command",
    "speculative_config": "the target answers plainly while its rows are recorded",
    "worker_cls": "ours records the rows",
    "worker_extension_cls": "ours ends vLLM with this command",
}


class EngineCommand(PageCommand):
    """A command that takes engine arguments of vLLM too; its function asks for them by `engine_arguments`."""

    def invoke(self, ctx: Any) -> Any:
        """Run the function."""
        token = _left.set(tuple(ctx.args))
        try:
            return super().invoke(ctx)
        finally:
            _left.reset(token)


def engine_arguments() -> dict[str, Any]:
    """What the command line says beyond the command's own options, by the names of vLLM's `EngineArgs`.

    Raises:
        MedusaError: what vLLM does not know either, or what is ours to decide.
    """
    left = list(_left.get())
    return parse_engine_arguments(left) if left else {}


def parse_engine_arguments(words: list[str]) -> dict[str, Any]:
    """Engine arguments from words of a command line, as `vllm serve` reads them; only what is given.

    Raises:
        MedusaError: see `engine_arguments`.
    """
    import argparse

    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> Any:
            raise MedusaError.of("options", " ".join(words), f"vLLM says: {message}; see vllm serve --help")

    parser = EngineArgs.add_cli_args(Parser(add_help=False, allow_abbrev=False))
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    found, unknown = parser.parse_known_args(words)
    if unknown:
        fix = "neither this command nor vllm serve knows it; see --help of both"
        raise MedusaError.of("option", unknown[0], fix)
    given: dict[str, Any] = vars(found)
    for name, fix in _OURS.items():
        if name in given:
            raise MedusaError.of(name, given[name], f"{fix}; leave it out")
    engines = given.pop("data_parallel_size", 1)
    if engines > 1:
        fix = "start this command that many times, each on its own devices, with one --work folder: they share the work"
        raise MedusaError.of("data_parallel_size", engines, fix)
    return given
