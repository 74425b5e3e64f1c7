"""How the target answers: lengths, temperatures, and vLLM's engine arguments."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_medusa.heads.source import locate_target
from vllm_medusa.training.engine import RECORDER, Engine

CONTEXT = 8192  # tokens of prompt and answer together, where the model takes as many
ANSWER = 1024
SHARD = 512  # prompts
# Each shard says its temperature, and more of them may be added; the rest changes when answers come, not which.
_MAY_DIFFER = ("temperatures", "enforce_eager", "engine")
# Of vLLM's arguments, those that change what the target says.
_DECIDES = ("dtype", "quantization", "revision", "kv_cache_dtype", "hf_overrides", "tokenizer", "tokenizer_revision")


@dataclass(frozen=True)
class AnswerOptions:
    """How the target answers.

    Attributes:
        max_new_tokens: of one answer; None: a quarter of the context, at least 1,024, at most half of it.
        max_model_len: prompt and answer together; None: 8,192, or what the model takes if that is less.
        batch_size: requests at once.
        shard_size: prompts per shard.
        temperatures: one pass over all prompts each, until there are tokens enough; 0: greedy.
        seed: of sampled answers.
        dtype: of the target.
        enforce_eager: do not compile the target: starts sooner, answers more slowly.
        engine: further arguments of vLLM's engine, by the names of its `EngineArgs`; they win over those above.
    """

    max_new_tokens: int | None = None
    max_model_len: int | None = None
    batch_size: int = 128
    shard_size: int = SHARD
    temperatures: tuple[float, ...] = (0.0,)
    seed: int = 0
    dtype: str = "bfloat16"
    enforce_eager: bool = False
    engine: Mapping[str, Any] = field(default_factory=dict)

    def recipe(self) -> dict[str, Any]:
        """What decides the answers, and so which rows may lie together: JSON."""
        told = {name: value for name, value in vars(self).items() if name not in _MAY_DIFFER}
        return {**told, **{name: str(self.engine[name]) for name in _DECIDES if name in self.engine}}

    @property
    def longest(self) -> int:
        """Tokens of prompt and answer together."""
        return self.max_model_len or CONTEXT

    @property
    def longest_answer(self) -> int:
        """Tokens of one answer."""
        wanted = self.max_new_tokens or max(ANSWER, self.longest // 4)
        return min(wanted, self.longest // 2) if self.max_new_tokens is None else wanted


def find_target(model: str, options: AnswerOptions) -> Path:
    """The target's folder, by the revision, cache and token that vLLM is told.

    Raises:
        MedusaError: neither a folder nor a repository that can be reached.
    """
    told = options.engine
    return locate_target(
        model, revision=told.get("revision"), cache=told.get("download_dir"), token=told.get("hf_token")
    )


def fit_to_model(model: str, options: AnswerOptions) -> AnswerOptions:
    """The same options, with no longer texts than the model takes, of which an answer may be half.

    Args:
        model: folder of the target.
        options: see AnswerOptions.
    """
    given = options.engine.get("max_model_len")
    length = int(given) if isinstance(given, int) and given > 0 else options.longest
    engine = {name: value for name, value in options.engine.items() if name != "max_model_len"}
    options = replace(options, engine=engine)
    if (Path(model) / "config.json").is_file():  # else nothing that vLLM could start; it says so itself when asked
        from vllm_medusa.host.positions import served_length

        length = served_length(model, length, options.engine)
    fitted = replace(options, max_model_len=length)
    return replace(fitted, max_new_tokens=min(fitted.longest_answer, length // 2))


def leaves_room(ids: list[int], options: AnswerOptions) -> bool:
    """Whether an answer fits behind a prompt."""
    return len(ids) + options.longest_answer <= options.longest


class AnsweringEngine(Engine):
    """The target in vLLM with our recording worker."""

    def __init__(self, model: str, options: AnswerOptions, console: Console | None = None) -> None:
        """`console`: where it is told that vLLM starts; None: nowhere."""
        compiles = "" if options.enforce_eager else ", which compiles the model"
        super().__init__(f"starting vLLM{compiles}", console, worker_cls=RECORDER, **engine_arguments(model, options))


def engine_arguments(model: str, options: AnswerOptions) -> dict[str, Any]:
    """What the target's engines are started with, recording or not."""
    return {
        "model": model,
        "dtype": options.dtype,
        "max_model_len": options.longest,
        "max_num_seqs": options.batch_size,
        "enforce_eager": options.enforce_eager,
        "enable_prefix_caching": False,
        "seed": options.seed,
        **options.engine,
    }
