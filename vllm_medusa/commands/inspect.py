"""The `inspect` command: what heads are."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_medusa.commands.options import readable_errors
from vllm_medusa.errors import MedusaError


def inspect(
    folder: Annotated[
        str | None, typer.Argument(help="The heads: a folder or hub id. Default: the bundled ones.", metavar="DIR")
    ] = None,
    heads: Annotated[str | None, typer.Option(help="The same, as the other commands name it.")] = None,
    tree: Annotated[
        str, typer.Option(help="static, chain, a preset's name, Medusa choices as JSON, or a .json file of them.")
    ] = "static",
    num_speculative_tokens: Annotated[int | None, typer.Option(min=1, max=128, help="Nodes of the tree.")] = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Draw the tree: .svg, .png or .pdf.", metavar="FILE")
    ] = None,
) -> None:
    """Show what heads are, how far they can be trusted, and the tree they would draft."""
    from vllm_medusa.inspection import show_heads

    with readable_errors():
        if folder is not None and heads is not None:
            raise MedusaError.of("heads", heads, f"the heads are named twice, {folder!r} too; keep one")
        show_heads(folder or heads, tree, num_speculative_tokens, Console(), picture)
