"""The `calibrate` command: how often heads are right, honest probabilities."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_medusa.commands.engine_options import engine_arguments
from vllm_medusa.commands.options import JsonOption, ModelOption, VerboseOption, readable_errors
from vllm_medusa.defaults import default_model


def calibrate(
    heads: Annotated[str, typer.Option(help="The heads: a folder; its config.json is written.")],
    prompts: Annotated[
        Path, typer.Option(help="A .jsonl file with `prompt` or `turns` per line, that the heads never learnt from.")
    ],
    model: ModelOption = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts to answer; the first ones.")] = 128,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 160,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(min=1, max=128, help="Nodes to draft here where a user names no number.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Draw all of it: .png, .svg or .pdf.", metavar="FILE")] = None,
    json_file: JsonOption = None,
    work: Annotated[
        Path | None, typer.Option(help="Keep the recorded answers here, so that a killed run goes on.")
    ] = None,
    cost: Annotated[bool, typer.Option("--cost/--no-cost", help="Measure what a step costs on this machine.")] = True,
    verbose: VerboseOption = False,
) -> None:
    """Measure how often heads are right on your prompts, and make their probabilities honest.

    The target answers the prompts; accuracy by head and rank and a temperature per head go into the heads' config.

    Engine arguments of `vllm serve` are handed on as they are: --tensor-parallel-size, --quantization, --revision, ...
    """
    if not verbose:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_medusa.training.answering import AnswerOptions
    from vllm_medusa.training.calibration_picture import draw_calibration
    from vllm_medusa.training.calibration_run import CalibrateOptions, run_calibration
    from vllm_medusa.tree.drawing import new_figure

    console = Console()
    with readable_errors():
        if out is not None:
            new_figure(out, "out", 1.0, 1.0)  # before an hour of work
        options = CalibrateOptions(
            model=model or default_model(),
            heads=heads,
            prompts=prompts,
            num_prompts=num_prompts,
            num_speculative_tokens=num_speculative_tokens,
            work=work,
            measure_cost=cost,
            answers=AnswerOptions(max_new_tokens=max_tokens, shard_size=64, engine=engine_arguments()),
        )
        report = run_calibration(options, console)
        console.print(report.tables())
        console.print(f"Written into {report.heads / 'config.json'}.")
        if json_file is not None:
            report.write_json(json_file)
        if out is not None:
            draw_calibration(report, out)
