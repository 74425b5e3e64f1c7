"""The `doctor` command: whether this installation can serve."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_medusa.commands.options import JsonOption, readable_errors


def doctor(
    model: Annotated[str | None, typer.Option(help="Your target: a folder or hub id, to be checked too.")] = None,
    heads: Annotated[
        str | None, typer.Option(help="Your heads: a folder or hub id. Default: the bundled ones.")
    ] = None,
    self_check: Annotated[
        bool, typer.Option("--self-check/--no-self-check", help="Serve a tiny model, plain and with trees.")
    ] = True,
    seconds: Annotated[float, typer.Option(min=1.0, help="When to give the self-check up.")] = 120.0,
    host_source: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Only read an unpacked vLLM: has it what we rely on? Nothing of it runs."),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Check this installation: vLLM, plugin, kernel, machine, heads, and that trees say what plain vLLM says.

    Exits with 1 if Medusa cannot serve here.
    """
    from vllm_medusa.doctor.report import Questions, run_checks

    with readable_errors():
        fine = run_checks(Console(), Questions(model, heads, self_check, seconds, host_source), json_file)
    if not fine:
        raise typer.Exit(1)
