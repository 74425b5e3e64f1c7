"""The `doctor` command: whether this installation can serve."""

import typer
from rich.console import Console

from vllm_medusa.commands.options import JsonOption


def doctor(json_file: JsonOption = None) -> None:
    """Check this installation: vLLM's version and what we rely on in it, the plugin, the platform, kernel and heads."""
    from vllm_medusa.doctor import run_checks

    if not run_checks(Console(), json_file):
        raise typer.Exit(1)
