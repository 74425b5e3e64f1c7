"""The `demo` command: what `make demo` runs."""

from typing import Annotated

import typer
from rich.console import Console

from vllm_medusa.commands.options import (
    DtypeOption,
    HeadsOption,
    JsonOption,
    ModelOption,
    VerboseOption,
    readable_errors,
)
from vllm_medusa.defaults import resolve


def demo(
    model: ModelOption = None,
    heads: HeadsOption = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="How often plain and Medusa take turns per kind of prompt.")] = 3,
    dtype: DtypeOption = "bfloat16",
    json_file: JsonOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Plain vLLM against Medusa trees on chat, code and math prompts, one request at a time."""
    from vllm_medusa.bench.demo import run_demo
    from vllm_medusa.bench.report import write_json
    from vllm_medusa.bench.run import Settings

    with readable_errors():
        chosen = resolve(model, heads)
        settings = Settings(chosen.model, chosen.heads, max_tokens=max_tokens, rounds=rounds, dtype=dtype)
        results = run_demo(settings, Console(), verbose=verbose)
        if json_file is not None:
            write_json(results, json_file)
