"""What a user may ask of Medusa: the only parser and validator of the settings in `speculative_config`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.tree.choices import PRESETS, load_choices, parse_choices, read_paths
from vllm_medusa.tree.growth import grow_static
from vllm_medusa.tree.topology import MAX_NODES, Tree

SampleMethod = Literal["greedy", "probabilistic"]
LinearProduct = Literal["auto", "medusa", "vllm"]
MODES = ("dynamic", "static", "chain")
# Most nodes where neither user nor calibration names a number: what may pay at all on few CPU cores, and the public
# Medusa tree's size.
DEFAULT_NODES = {"cpu": 32, "cuda": 63}
SETTINGS_KEY = "medusa"  # where the settings travel to the workers: VllmConfig.additional_config["medusa"]


def _strict_int(value: Any) -> Any:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError("must be a whole number")
    return value


def _strict_text(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("must be text")
    return value


def _strict_tree(value: Any) -> Any:
    """A name, or paths of whole numbers as they were written: 0.0, true and "0" are none."""
    return [list(path) for path in read_paths(value)] if isinstance(value, list | tuple) else _strict_text(value)


class MedusaConfig(BaseModel):
    """The keys of `speculative_config` that are ours.

    >>> MedusaConfig.parse({"method": "medusa", "model": "heads/", "tree": "chain"})[0].tree
    'chain'
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Annotated[str, BeforeValidator(_strict_text), Field(min_length=1)]
    num_speculative_tokens: Annotated[int, BeforeValidator(_strict_int), Field(ge=1, le=MAX_NODES)] | None = None
    tree: Annotated[str | list[list[int]], BeforeValidator(_strict_tree)] = "dynamic"
    adaptive: Annotated[bool, Field(strict=True)] = True
    draft_vocab: Annotated[bool, Field(strict=True)] = True
    draft_sample_method: SampleMethod = "greedy"
    prompt_lookup: Annotated[bool, Field(strict=True)] = True
    linear_product: LinearProduct = "auto"

    @classmethod
    def parse(
        cls, settings: Mapping[str, Any], host_keys: frozenset[str] = frozenset()
    ) -> tuple[MedusaConfig, dict[str, Any]]:
        """Split and check a user's dict.

        Args:
            settings: what the user wrote; `method` is ignored.
            host_keys: further keys that the host's own SpeculativeConfig takes; they are passed through.

        Returns:
            Our settings, and the host's keys with their values.

        Raises:
            MedusaError: an unknown key, a missing `model`, a wrong type or a value out of range.
        """
        ours = {key: value for key, value in settings.items() if key in cls.model_fields}
        rest = {key: value for key, value in settings.items() if key not in cls.model_fields and key != "method"}
        for key, value in rest.items():
            if key not in host_keys:
                known = ", ".join(["method", *cls.model_fields])
                raise MedusaError.of(key, value, f"unknown key in speculative_config; Medusa knows {known}")
        if ours.get("model") is None:
            raise MedusaError.of("model", None, "name the heads: a folder or a hub id")
        if isinstance(ours["model"], Path):
            ours["model"] = str(ours["model"])
        if ours.get("num_speculative_tokens", 0) is None:
            del ours["num_speculative_tokens"]
        try:
            return cls(**ours), rest
        except ValidationError as error:
            raise _readable(error, ours) from None


class Settings(BaseModel):
    """Checked settings with everything looked up: what travels to the worker as JSON.

    Attributes:
        heads: folder of the heads.
        num_speculative_tokens: most nodes drafted per request and step.
        parents, ranks: of a fixed tree (see `Tree`); None where trees are grown at each step.
        draft_sample_method: "greedy" drafts the heads' likeliest tokens; "probabilistic" draws those of sampled
            requests, in a tree whose shape is fixed.
        prompt_lookup: trees that are grown also hold what the request's own text expects next.
        linear_product: on a CPU, what multiplies with the target's matrices: "auto" is whichever of our product and
            vLLM's is quicker for the rows at hand, as measured at start-up.
        widths: nodes by the number of requests, where the user says so and the host does not know: first and last
            number, nodes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    heads: str
    num_speculative_tokens: int
    parents: list[int] | None = None
    ranks: list[int] | None = None
    adaptive: bool = True
    draft_vocab: bool = True
    draft_sample_method: SampleMethod = "greedy"
    prompt_lookup: bool = True
    linear_product: LinearProduct = "auto"
    widths: list[tuple[int, int, int]] | None = None

    @property
    def fixed_tree(self) -> Tree | None:
        """The tree that every step drafts, or None if it is grown anew each time."""
        if self.parents is None:
            return None
        return Tree(tuple(self.parents), tuple(self.ranks or ()))


def resolve(
    config: MedusaConfig,
    heads_folder: str,
    *,
    num_heads: int,
    top_k: int,
    rank_accuracy: list[list[float]] | None,
    default_nodes: int,
) -> Settings:
    """Choose the tree and its size.

    Args:
        config: the user's settings.
        heads_folder: where the heads lie on this machine.
        num_heads: K, the deepest a tree can be.
        top_k: R, candidates each head offers.
        rank_accuracy: [K][R] from calibration; a typical table stands in where heads carry none.
        default_nodes: nodes where the user names no number.

    Raises:
        MedusaError: a tree that these heads cannot fill.

    >>> asked = MedusaConfig(model="heads/", tree="static", num_speculative_tokens=3)
    >>> accuracy = [[0.6, 0.2], [0.5, 0.1]]
    >>> resolve(asked, "heads/", num_heads=2, top_k=2, rank_accuracy=accuracy, default_nodes=16).fixed_tree
    Tree(parents=(0, 1, 0), ranks=(0, 0, 1))
    """
    nodes = config.num_speculative_tokens
    tree = _fixed_tree(config.tree, nodes or default_nodes, num_heads, top_k, rank_accuracy)
    if tree is not None and nodes is not None:
        tree = tree.prefix(nodes)
    return Settings(
        heads=heads_folder,
        num_speculative_tokens=tree.num_nodes if tree is not None else min(nodes or default_nodes, MAX_NODES),
        parents=None if tree is None else list(tree.parents),
        ranks=None if tree is None else list(tree.ranks),
        adaptive=config.adaptive,
        draft_vocab=config.draft_vocab,
        draft_sample_method=config.draft_sample_method,
        prompt_lookup=config.prompt_lookup and tree is None,
        linear_product=config.linear_product,
    )


def typical_rank_accuracy(num_heads: int, top_k: int) -> list[list[float]]:
    """A stand-in for heads without calibration (a guess, not a measurement): accuracy falls with head and rank."""
    first = [0.45, 0.13, 0.07, 0.05, 0.03, 0.025, 0.02, 0.015, 0.012, 0.01]
    return [
        [round(first[min(rank, len(first) - 1)] * 0.65**head, 6) for rank in range(top_k)] for head in range(num_heads)
    ]


def rank_accuracy_of(heads: HeadsConfig) -> list[list[float]]:
    """[K][R]: measured where the heads are calibrated, else typical."""
    if heads.calibration is not None:
        return heads.calibration.rank_accuracy
    return typical_rank_accuracy(heads.num_heads, heads.top_k)


def _fixed_tree(
    tree: str | list[list[int]], nodes: int, num_heads: int, top_k: int, rank_accuracy: list[list[float]] | None
) -> Tree | None:
    if isinstance(tree, list):
        return parse_choices(tree, num_heads, top_k)
    if tree == "dynamic":
        return None
    if tree == "chain":
        return Tree.chain(min(nodes, num_heads))
    if tree == "static":
        return grow_static(rank_accuracy or typical_rank_accuracy(num_heads, top_k), nodes)
    if tree in PRESETS:
        return parse_choices(PRESETS[tree], num_heads, top_k)
    if tree.endswith(".json"):
        return parse_choices(load_choices(Path(tree)), num_heads, top_k)
    names = ", ".join([*MODES, *PRESETS])
    raise MedusaError.of("tree", tree, f"choose {names}, a list of Medusa choices or a .json file of them")


def _readable(error: ValidationError, settings: Mapping[str, Any]) -> MedusaError:
    """The first finding of pydantic as one of our sentences."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, MedusaError):
        return cause
    key = str(first["loc"][0]) if first["loc"] else "speculative_config"
    expected = {
        "model": "name the heads: a folder or a hub id",
        "num_speculative_tokens": f"give a whole number from 1 to {MAX_NODES}, the most nodes of a tree",
        "tree": f"choose {', '.join(MODES)}, a preset, a list of choices such as [[0], [0, 0], [1]] or a .json file",
        "adaptive": "give true or false",
        "draft_vocab": "give true or false",
        "prompt_lookup": "give true or false",
        "linear_product": "choose 'auto' (whichever is measured to be quicker), 'medusa' or 'vllm'",
        "draft_sample_method": "choose 'greedy' (the likeliest tokens) or 'probabilistic' (drawn from the heads)",
    }.get(key, str(first["msg"]))
    return MedusaError.of(key, settings.get(key), expected)
