"""The `vllm-medusa` command: thin, every command is a few lines over the module that does the work."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from vllm_medusa.defaults import default_model, resolve
from vllm_medusa.errors import MedusaError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Medusa speculative decoding for vLLM: a tree of guesses is checked in one pass, the same tokens come sooner.",
)

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
        yield
    except MedusaError as error:
        message = f"[bold red]error:[/] {escape(str(error))}"
        Console(stderr=True, soft_wrap=True).print(message, highlight=False)
        raise typer.Exit(1) from error


@app.command()
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


@app.command()
def bench(
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="A .jsonl file with `prompt` or `turns` per line; may be repeated. Default: the demo's prompts."
        ),
    ] = None,
    model: ModelOption = None,
    heads: HeadsOption = None,
    native_heads: Annotated[
        str | None, typer.Option(help="Plain heads for native-chain. Default: the same as for Medusa.")
    ] = None,
    methods: Annotated[
        str,
        typer.Option(help="Comma-separated: none, medusa, medusa-static, medusa-chain, native-chain, ngram."),
    ] = "none,medusa",
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated numbers of requests in flight.")] = "1",
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts per data file; the first ones.")] = 20,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(min=1, max=128, help="Most tree nodes per request and step.")
    ] = None,
    adaptive: Annotated[
        bool | None, typer.Option("--adaptive/--no-adaptive", help="Size trees by measured step cost.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often the methods take turns: A B A B.")] = 3,
    dtype: DtypeOption = "auto",
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="Do not compile the model.")] = False,
    json_file: JsonOption = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw the ratios.", metavar="FILE")] = None,
    verbose: VerboseOption = False,
) -> None:
    """Measure methods against plain vLLM, engines side by side, runs alternated."""
    from vllm_medusa.bench.demo import demo_datasets
    from vllm_medusa.bench.peers import choose_peers
    from vllm_medusa.bench.progress import BenchProgress
    from vllm_medusa.bench.prompts import read_datasets
    from vllm_medusa.bench.report import plot, table, write_json
    from vllm_medusa.bench.run import Settings, run_bench

    console = Console()
    with readable_errors():
        peers = choose_peers([name.strip() for name in methods.split(",") if name.strip()])
        sizes = _sizes(batch_sizes)
        datasets = read_datasets(data, num_prompts) if data else [d.take(num_prompts) for d in demo_datasets()]
        chosen = resolve(model, heads, need_heads=any(peer.uses_heads for peer in peers))
        settings = Settings(
            chosen.model,
            chosen.heads,
            native_heads=native_heads,
            batch_sizes=sizes,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            rounds=rounds,
            num_speculative_tokens=num_speculative_tokens,
            adaptive=adaptive,
            dtype=dtype,
            enforce_eager=enforce_eager,
        )
        with BenchProgress(console) as progress:
            results = run_bench(peers, datasets, settings, progress, verbose=verbose)
        console.print(table(results))
        if json_file is not None:
            write_json(results, json_file)
        if plot_file is not None:
            plot(results, plot_file)


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="Folder of the heads, written at the end.")],
    prompts: Annotated[Path | None, typer.Option(help="A .jsonl file with `prompt` or `turns` per line.")] = None,
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
    base_model: Annotated[str | None, typer.Option(help="The target's public name, for the card.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Answer tokens to learn from.")] = 640_000,
    held_out: Annotated[int, typer.Option(min=1, help="Prompts kept for calibration, the first ones.")] = 128,
    num_heads: Annotated[int, typer.Option(min=1, max=32)] = 4,
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
    epochs: Annotated[int, typer.Option(min=1)] = 3,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per step.")] = 256,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="The peak, after a warm-up.")] = 1.5e-3,
    seed: Annotated[int, typer.Option()] = 0,
    verbose: VerboseOption = False,
) -> None:
    """Make heads for a model: it answers the prompts, heads learn from its hidden rows and are calibrated.

    A killed run goes on where it stopped when the same command is given again.
    """
    if not verbose:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_medusa.training.data import AnswerOptions
    from vllm_medusa.training.loop import LoopOptions
    from vllm_medusa.training.options import TrainOptions, parse_temperatures
    from vllm_medusa.training.run import train as run_training

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
            num_heads=num_heads,
            num_layers=num_layers,
            trunk_size=trunk_size or None,
            root_conditioned=root_conditioned,
            draft_vocab_size=draft_vocab_size or None,
            answers=AnswerOptions(temperatures=parse_temperatures(temperatures), seed=seed),
            loop=LoopOptions(epochs, batch_size, learning_rate, loss=loss, seed=seed),
        )
        run_training(options, Console())


@app.command()
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
    """
    if not verbose:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_medusa.training.calibration_picture import draw_calibration
    from vllm_medusa.training.calibration_run import CalibrateOptions, run_calibration
    from vllm_medusa.training.data import AnswerOptions
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
            answers=AnswerOptions(max_new_tokens=max_tokens, shard_size=64),
        )
        report = run_calibration(options, console)
        console.print(report.tables())
        console.print(f"Written into {report.heads / 'config.json'}.")
        if json_file is not None:
            report.write_json(json_file)
        if out is not None:
            draw_calibration(report, out)


@app.command()
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


@app.command()
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


@app.command()
def doctor(json_file: JsonOption = None) -> None:
    """Check this installation: vLLM's version and what we rely on in it, the plugin, the platform, kernel and heads."""
    from vllm_medusa.doctor import run_checks

    if not run_checks(Console(), json_file):
        raise typer.Exit(1)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise MedusaError.of("batch-sizes", text, "give whole numbers from 1 up, such as 1,4,16")
    return sizes


if __name__ == "__main__":
    app()
