"""The `bench` command: methods against plain vLLM."""

from pathlib import Path
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
from vllm_medusa.errors import MedusaError


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
        str | None,
        typer.Option(help="Plain heads for native-chain. Default: the same as for Medusa, if they are plain."),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(help="Comma-separated: none, medusa, medusa-static, medusa-chain, native-chain, ngram."),
    ] = "none,medusa",
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated numbers of requests in flight.")] = "1",
    server: Annotated[
        bool,
        typer.Option(
            "--server", help="Ask a `vllm serve` per method over HTTP: also time to first token and between tokens."
        ),
    ] = False,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts per data file; the first ones.")] = 20,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of sampling; 0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Of sampling; 1: all tokens.")] = 1.0,
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
    show_cost: Annotated[
        bool, typer.Option("--show-cost", help="Tell what a step costs by its tokens, and how many nodes pay.")
    ] = False,
    plot_file: Annotated[
        Path | None,
        typer.Option(
            "--plot", help="Draw ratios, and accepted length against nodes: .svg, .png or .pdf.", metavar="FILE"
        ),
    ] = None,
    verbose: VerboseOption = False,
) -> None:
    """Measure methods against plain vLLM, engines side by side, runs alternated: offline, or servers over HTTP."""
    from vllm_medusa.bench.demo import demo_datasets
    from vllm_medusa.bench.native import check_expressible
    from vllm_medusa.bench.peers import choose_peers, has_report
    from vllm_medusa.bench.picture import check_picture, plot
    from vllm_medusa.bench.progress import BenchProgress
    from vllm_medusa.bench.prompts import read_datasets
    from vllm_medusa.bench.report import latency_table, left_out_line, memory_line, table, write_json
    from vllm_medusa.bench.run import Settings, run_bench
    from vllm_medusa.bench.step_cost import cost_table
    from vllm_medusa.bench.verdict import verdict

    console = Console()
    with readable_errors():
        peers = choose_peers([name.strip() for name in methods.split(",") if name.strip()])
        learning = [peer.name for peer in peers if has_report(peer.speculative_config)]
        if show_cost and not learning:
            raise MedusaError.of("methods", methods, "only Medusa trees learn what a step costs; add medusa")
        if plot_file is not None:
            check_picture(plot_file)
        sizes = _sizes(batch_sizes)
        datasets = read_datasets(data, num_prompts) if data else [d.take(num_prompts) for d in demo_datasets()]
        chosen = resolve(model, heads, need_heads=any(peer.uses_heads for peer in peers))
        if chosen.heads is not None and any(peer.exports_heads for peer in peers):
            check_expressible(native_heads or chosen.heads)
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
            server=server,
        )
        with BenchProgress(console) as progress:
            results = run_bench(peers, datasets, settings, progress, verbose=verbose)
        teller = "medusa" if "medusa" in learning else next(iter(learning), "")
        shown = [table(results), left_out_line(results), latency_table(results), memory_line(results)]
        for part in (*shown, verdict(results, teller)):
            if part is not None:
                console.print(part)
        if show_cost:
            console.print(cost_table(results, teller))
        if json_file is not None:
            write_json(results, json_file)
        if plot_file is not None:
            plot(results, plot_file)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise MedusaError.of("batch-sizes", text, "give whole numbers from 1 up, such as 1,4,16")
    return sizes
