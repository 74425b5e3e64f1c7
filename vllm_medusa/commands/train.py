"""The `train` command: heads for a model."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from vllm_medusa.commands.engine_options import engine_arguments
from vllm_medusa.commands.options import ModelOption, VerboseOption, readable_errors
from vllm_medusa.defaults import default_model


def train(
    out: Annotated[Path, typer.Option(help="Folder of the heads, written at the end.")],
    prompts: Annotated[
        Path | None, typer.Option(help="A .jsonl file with `prompt`, `turns` or `messages` per line.")
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(help="A .jsonl file with `text` per line in place of prompts: documents to go on from."),
    ] = None,
    self_prompts: Annotated[
        int, typer.Option(min=0, help="Prompts that the model invents itself, beside --prompts or without it.")
    ] = 0,
    model: ModelOption = None,
    work: Annotated[
        Path | None,
        typer.Option(help="Where recorded rows are kept, so that a killed run goes on. Default: beside OUT."),
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="The target's public name, for the card. Default: MODEL.")
    ] = None,
    max_answer_tokens: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of one answer. Default: a quarter of the context, at least 1,024."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most answer tokens to learn from.")] = 2_000_000,
    keep_rows: Annotated[
        int | None,
        typer.Option(
            min=1, help="Answer tokens on disk at a time; answering and training take turns. With --epochs 1."
        ),
    ] = None,
    held_out: Annotated[int, typer.Option(min=1, help="Prompts kept for calibration, the first ones.")] = 128,
    num_heads: Annotated[int, typer.Option(min=1, max=32, help="How many tokens ahead heads guess.")] = 4,
    num_layers: Annotated[
        int | None, typer.Option(min=0, max=16, help="Residual blocks per head. Default: none behind a trunk, else 2.")
    ] = None,
    trunk_size: Annotated[
        int, typer.Option(min=0, help="Width of the layer that root-conditioned heads share; 0: none.")
    ] = 1152,
    root_conditioned: Annotated[
        bool,
        typer.Option(
            "--root-conditioned/--plain", help="Heads also read the root token; plain ones serve elsewhere too."
        ),
    ] = True,
    unembedding: Annotated[
        Literal["target", "shared", "per_head"],
        typer.Option(
            help="Share the target's, frozen, or learn one for all heads or one for each, from the target's on."
        ),
    ] = "target",
    draft_vocab_size: Annotated[
        int, typer.Option(min=0, help="Tokens the heads can guess, the target's most frequent ones; 0: all.")
    ] = 8192,
    evaluate: Annotated[
        list[Path] | None,
        typer.Option(
            help="A .jsonl file whose first 40 prompts are replayed at the end, never learnt from; repeatable."
        ),
    ] = None,
    notes: Annotated[Path | None, typer.Option(help="Markdown for the end of the model card.")] = None,
    temperatures: Annotated[
        str, typer.Option(help="One pass over the prompts each, until there are tokens enough; 0: greedy.")
    ] = "0",
    loss: Annotated[
        Literal["ce", "kl", "mixed"],
        typer.Option(help="Learn the token that came, the target's own distribution there, or half each."),
    ] = "mixed",
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the answers.")] = 2,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per step, of all processes together.")] = 256,
    accumulate: Annotated[
        int, typer.Option(min=1, help="Pieces in which a process computes its share of a batch: less memory.")
    ] = 1,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="The peak, after a warm-up.")] = 1.5e-3,
    seed: Annotated[int, typer.Option(help="Of sampled answers, and of training.")] = 0,
    compare_served: Annotated[
        bool,
        typer.Option(
            "--compare-served/--no-compare-served",
            help="Serve the heads at the end; the card says whether they bring what their replay promises.",
        ),
    ] = True,
    push_to_hub: Annotated[
        str | None, typer.Option(help="Put heads and card into this repository of the hub.", metavar="ORG/NAME")
    ] = None,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="Do not compile the model.")] = False,
    verbose: VerboseOption = False,
) -> None:
    """Make heads for a model: it answers the prompts, heads learn from its hidden rows and are calibrated.

    A killed run goes on where it stopped when the same command is given again.

    Engine arguments of `vllm serve` are handed on as they are: --tensor-parallel-size, --quantization, --revision, ...
    """
    if not verbose:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_medusa.training.answering import AnswerOptions
    from vllm_medusa.training.options import TrainOptions, parse_temperatures
    from vllm_medusa.training.run import train as run_training
    from vllm_medusa.training.step import LoopOptions

    with readable_errors():
        options = TrainOptions(
            model=model or default_model(),
            prompts=prompts,
            texts=texts,
            self_prompts=self_prompts,
            evaluate=tuple(evaluate or ()),
            notes=notes,
            out=out,
            work=work,
            base_model=base_model,
            held_out=held_out,
            max_tokens=max_tokens,
            keep_rows=keep_rows,
            num_heads=num_heads,
            num_layers=num_layers,
            trunk_size=trunk_size or None,
            root_conditioned=root_conditioned,
            unembedding=unembedding,
            draft_vocab_size=draft_vocab_size or None,
            compare_served=compare_served,
            push_to_hub=push_to_hub,
            answers=AnswerOptions(
                max_new_tokens=max_answer_tokens,
                temperatures=parse_temperatures(temperatures),
                seed=seed,
                enforce_eager=enforce_eager,
                engine=engine_arguments(),
            ),
            loop=LoopOptions(epochs, batch_size, learning_rate, loss=loss, seed=seed, accumulate=accumulate),
        )
        run_training(options, Console())
