"""A bench from start to end: engines side by side, warm-up, then alternated runs."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vllm_medusa.bench import provenance
from vllm_medusa.bench.engine import Engine
from vllm_medusa.bench.peers import Peer, peer_environment, shared_environment, speculative_config
from vllm_medusa.bench.process import EngineProcess
from vllm_medusa.bench.progress import BenchProgress
from vllm_medusa.bench.prompts import Dataset
from vllm_medusa.bench.results import Results, measure

if TYPE_CHECKING:
    from vllm_medusa.bench.server import Server

WARM_UP_TOKENS = 32


@dataclass(frozen=True)
class Settings:
    """What a bench measures and how.

    `native_heads`: heads for native-chain where they are not the same (vLLM's own Medusa cannot serve heads that read
    the root token). `adaptive` and `num_speculative_tokens`: None leaves the plugin's default. `server`: ask a `vllm
    serve` over HTTP, `batch_sizes` being requests in flight, instead of driving `vllm.LLM`.
    """

    model: str
    heads: str | None
    native_heads: str | None = None
    batch_sizes: tuple[int, ...] = (1,)
    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    rounds: int = 3
    num_speculative_tokens: int | None = None
    adaptive: bool | None = None
    dtype: str = "auto"
    enforce_eager: bool = False
    max_model_len: int = 2048  # or as many as the model has
    server: bool = False

    def engine(self, peer: Peer) -> dict[str, Any]:
        """Keyword arguments of `vllm.LLM` for this peer. Prefix caching is off: each round must do the same work."""
        heads = (self.native_heads or self.heads) if peer.exports_heads else self.heads
        return {
            "model": self.model,
            "dtype": self.dtype,
            "enforce_eager": self.enforce_eager,
            "max_model_len": self.max_model_len,
            "max_num_seqs": max(self.batch_sizes),
            "enable_prefix_caching": False,
            "seed": 0,
            "speculative_config": speculative_config(peer, heads, self.num_speculative_tokens, self.adaptive),
        }

    def sampling(self) -> dict[str, Any]:
        """Keyword arguments of `SamplingParams`."""
        return {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_tokens}


def run_bench(
    peers: Sequence[Peer],
    datasets: Sequence[Dataset],
    settings: Settings,
    progress: BenchProgress,
    *,
    verbose: bool = False,
    then: Callable[[dict[str, EngineProcess], Results], None] | None = None,
) -> Results:
    """Measure the peers (the baseline first) on every data set and batch size, alternated A B A B.

    `then` is called with the engines, still up, and the results: for what needs a tokenizer, such as drawing.
    """
    results = Results(
        provenance.collect(shared_environment(), settings=asdict(settings), methods=[p.name for p in peers])
    )
    with ExitStack() as stack:
        engines = _start(stack, peers, settings, progress, verbose)
        results.provenance["engine"] = {name: engine.facts for name, engine in engines.items()}
        datasets = _that_fit(engines, datasets, settings, results)
        _warm_up(engines, datasets[0], settings, progress)
        rounds = [(d, b, r) for d in datasets for b in settings.batch_sizes for r in range(settings.rounds)]
        progress.expect(sum(len(dataset.prompts) for dataset, _, _ in rounds) * len(peers))
        for dataset, batch_size, number in rounds:
            _one_round(engines, dataset, batch_size, number, settings, results, progress)
        for name, engine in engines.items():
            results.provenance["engine"][name]["peak_resident_mib"] = engine.peak_resident_mib()
        if then is not None:
            then(engines, results)
    return results


def _start(
    stack: ExitStack, peers: Sequence[Peer], settings: Settings, progress: BenchProgress, verbose: bool
) -> dict[str, EngineProcess]:
    """One after the other: two engines that compile at the same time on a small machine only wait for each other.

    A GPU's memory is theirs in equal parts.
    """
    kind, part = _kind(settings), {"gpu_memory_utilization": round(0.9 / len(peers), 3)}
    engines: dict[str, EngineProcess] = {}
    for peer in peers:
        with progress.starting(peer.name) as watch:
            engine = kind(
                peer.name,
                settings.engine(peer) | part,
                environment=peer_environment(peer),
                export_heads=peer.exports_heads,
                verbose=verbose,
            )
            engines[peer.name] = stack.enter_context(engine)
            engine.wait_until_ready(watch(engine))
    return engines


def _that_fit(
    engines: dict[str, EngineProcess], datasets: Sequence[Dataset], settings: Settings, results: Results
) -> list[Dataset]:
    """The data sets without prompts that leave no room for an answer; methods can answer all of the rest."""
    engine = next(iter(engines.values()))
    most = engine.facts["max_model_len"] - settings.max_tokens
    kept = [dataset.fitting(engine.lengths(dataset.prompts), most) for dataset in datasets]
    for before, after in zip(datasets, kept, strict=True):
        if len(after.prompts) < len(before.prompts):
            results.left_out[before.name] = len(before.prompts) - len(after.prompts)
    results.provenance["longest_prompt"] = most
    return kept


def _kind(settings: Settings) -> type[Engine] | type["Server"]:
    if not settings.server:
        return Engine
    from vllm_medusa.bench.server import Server  # brings an HTTP client, which only comes with vLLM

    return Server


def _warm_up(engines: dict[str, EngineProcess], dataset: Dataset, settings: Settings, progress: BenchProgress) -> None:
    """A few tokens at every batch size: kernels that are built on first use, and the step costs that Medusa learns."""
    sampling = {**settings.sampling(), "max_tokens": min(WARM_UP_TOKENS, settings.max_tokens)}
    for batch_size in settings.batch_sizes:
        for name, engine in engines.items():
            with progress.doing(f"warming up {name} with batches of {batch_size}"):
                engine.run(dataset.prompts[: max(2, batch_size)], batch_size=batch_size, sampling=sampling)


def _one_round(
    engines: dict[str, EngineProcess],
    dataset: Dataset,
    batch_size: int,
    number: int,
    settings: Settings,
    results: Results,
    progress: BenchProgress,
) -> None:
    """Every method once, the baseline first."""
    plain: list[list[int]] | None = None
    for name, engine in engines.items():
        with progress.running(f"{name} · {dataset.name} · batch {batch_size}", len(dataset.prompts)) as watch:
            measurement = engine.run(
                dataset.prompts, batch_size=batch_size, sampling=settings.sampling(), progress=watch
            )
        plain = measurement["outputs"] if plain is None else plain
        results.runs.append(
            measure(
                measurement,
                plain,
                method=name,
                dataset=dataset.name,
                batch_size=batch_size,
                temperature=settings.temperature,
                round=number,
            )
        )
        report = measurement["report"]
        if report is not None:
            results.examples = [example | {"candidates": report["candidates"]} for example in report["examples"]]
            results.costs[name] = report["cost"]
