"""Options that several commands share, and how their errors are told."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from vllm_medusa.errors import MedusaError

ModelOption = Annotated[
    str | None,
    typer.Option(help="Target model: a folder or hub id. Default: SmolLM2-135M-Instruct, fetched once."),
]
HeadsOption = Annotated[
    str | None, typer.Option(help="Medusa heads: a folder. Default: the bundled ones for SmolLM2-135M-Instruct.")
]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", metavar="FILE")]
DtypeOption = Annotated[
    Literal["auto", "bfloat16", "float16", "float32"], typer.Option(help="Number format; auto: the model's own.")
]
VerboseOption = Annotated[bool, typer.Option("--verbose", help="Show what vLLM logs.")]


@contextmanager
def readable_errors() -> Iterator[None]:
    """Print what users can mend as one message without a traceback, and exit with status 1."""
    try:
        try:
            yield
        except ModuleNotFoundError as error:
            if error.name != "vllm":
                raise
            fix = "this needs vLLM: pip install 'vllm-medusa[cpu]'"
            raise MedusaError.of("package", "vllm", f"not installed; {fix}") from error
    except MedusaError as error:
        message = f"[bold red]error:[/] {escape(str(error))}"
        Console(stderr=True, soft_wrap=True).print(message, highlight=False)
        raise typer.Exit(1) from error
