"""The `convert` command: heads in another format."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from vllm_medusa.commands.options import readable_errors


def convert(
    src: Annotated[str, typer.Argument(help="Heads: a folder or hub id, in any format that vllm-medusa reads.")],
    dst: Annotated[Path, typer.Argument(help="A new folder.")],
    to: Annotated[Literal["ours", "vllm"], typer.Option(help="ours, or that of vLLM up to 0.32.")],
    model: Annotated[
        str | None,
        typer.Option(help="The target, to check against; for vLLM's format its unembedding may be needed."),
    ] = None,
) -> None:
    """Write heads in another format: from FasterDecoding, TGI, TensorRT Model Optimizer, vLLM or ours."""
    from vllm_medusa.heads.conversion import convert as run_conversion

    console = Console(soft_wrap=True, highlight=False)
    with readable_errors():
        done = run_conversion(src, dst, to, model)
        console.print(f"{done.origin} → {to}: {done.config.num_heads} heads × {done.config.num_layers} blocks")
        console.print(f"{done.tensors} tensors read back from {dst}, the same bit by bit", markup=False)
        if done.note:
            console.print(f"note: {done.note}", markup=False)
        if done.kept:
            console.print(f"with {', '.join(done.kept)} as they were; check what they say", markup=False)
