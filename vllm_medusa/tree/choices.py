"""Medusa choices: trees as people write them down, lists of paths of candidate ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm_medusa.errors import MedusaError
from vllm_medusa.json_file import NotJson, load_json
from vllm_medusa.tree.topology import MAX_NODES, Tree


def parse_choices(choices: object, num_heads: int, top_k: int, key: str = "tree") -> Tree:
    """The tree that a list of Medusa choices describes.

    A choice is the path to one node: `[0, 2]` is "the third candidate of the second head below the best candidate of
    the first". The order is kept if every path comes after its own beginning (so that the first n choices are a
    tree as well), else shorter paths are moved to the front.

    Args:
        choices: list of lists of ranks, for example `[[0], [0, 0], [1]]`.
        num_heads: K, the deepest a path can be.
        top_k: R, candidates each head offers.
        key: what the user calls this value, for messages.

    Raises:
        MedusaError: no paths, not lists of whole numbers, a path twice or without its beginning, deeper than the
            heads, a rank they do not offer, more than 128 nodes.

    >>> parse_choices([[0], [0, 0], [1], [0, 1]], num_heads=2, top_k=2)
    Tree(parents=(0, 1, 0, 1), ranks=(0, 0, 1, 1))
    """
    paths = read_paths(choices, key)
    known: set[tuple[int, ...]] = set(paths)
    for path in paths:
        shown = list(path)
        if len(path) > num_heads:
            raise MedusaError.of(key, shown, f"there are {num_heads} heads; give paths of at most {num_heads} ranks")
        if max(path) >= top_k:
            raise MedusaError.of(
                key, shown, f"each head offers {top_k} candidates; give ranks from 0 to {top_k - 1} (counted from 0)"
            )
        if len(path) > 1 and path[:-1] not in known:
            raise MedusaError.of(key, shown, f"add the path it goes through, {shown[:-1]}")
    if len(known) < len(paths):
        twice = next(path for index, path in enumerate(paths) if path in paths[:index])
        raise MedusaError.of(key, list(twice), "the same path is listed twice; drop one")
    row_of = {path: row for row, path in enumerate(paths, start=1)}
    if any(row_of[path[:-1]] > row_of[path] for path in paths if len(path) > 1):
        paths.sort(key=len)
        row_of = {path: row for row, path in enumerate(paths, start=1)}
    row_of[()] = 0
    return Tree(tuple(row_of[path[:-1]] for path in paths), tuple(path[-1] for path in paths))


def read_paths(choices: object, key: str = "tree") -> list[tuple[int, ...]]:
    """The paths of a list of Medusa choices: what can be said of them before the heads are known.

    Raises:
        MedusaError: no paths, more than 128, not lists of whole numbers from 0 up.
    """
    listed = _listed(choices, key)
    if len(listed) > MAX_NODES:
        raise MedusaError.of(key, f"{len(listed)} paths", f"a tree has at most {MAX_NODES} nodes; drop some")
    return [_path(choice, key) for choice in listed]


def to_choices(tree: Tree) -> list[list[int]]:
    """A tree as Medusa choices, in the order of its nodes; the reverse of `parse_choices`.

    >>> to_choices(Tree(parents=(0, 1, 0, 1)))
    [[0], [0, 0], [1], [0, 1]]
    """
    paths: list[list[int]] = [[]]
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        paths.append([*paths[parent], rank])
    return paths[1:]


def load_choices(path: Path | str) -> Any:
    """What a .json file holds, still to be checked by `parse_choices`.

    Raises:
        MedusaError: the file cannot be read or is not JSON.
    """
    try:
        return load_json(Path(path))
    except NotJson as error:
        fix = f"the file {error}; it should hold a list such as [[0], [0, 0], [1]]"
        raise MedusaError.of("tree", str(path), fix) from None


def _listed(choices: object, key: str) -> Sequence[object]:
    example = "give a list of paths such as [[0], [0, 0], [1]]"
    if not isinstance(choices, list | tuple):
        raise MedusaError.of(key, choices, example)
    if not choices:
        raise MedusaError.of(key, choices, f"the tree is empty; {example}")
    return choices


def _path(choice: object, key: str) -> tuple[int, ...]:
    if not isinstance(choice, list | tuple):
        raise MedusaError.of(key, choice, "a path is a list of ranks such as [0, 2]")
    if not choice:
        raise MedusaError.of(key, choice, "a path has at least one rank; the root is there anyway, drop it")
    for rank in choice:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
            raise MedusaError.of(key, choice, "ranks are whole numbers from 0 (a head's best candidate) up")
    return tuple(choice)


def _digits(paths: str) -> tuple[tuple[int, ...], ...]:
    """Paths of one-digit ranks, one word each: "0 02" is [0] and [0, 2]."""
    return tuple(tuple(map(int, word)) for word in paths.split())


# The tree that Medusa's authors measured for Vicuna 7B (named as they name it, arXiv:2401.10774, section 3.3), most
# useful nodes first. It needs four heads of ten candidates.
_MC_SIM_7B_63 = _digits(
    "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 0000 "
    "011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070"
)

PRESETS: Mapping[str, Sequence[Sequence[int]]] = MappingProxyType(
    {
        "small_8": _MC_SIM_7B_63[:8],
        "small_16": _MC_SIM_7B_63[:16],
        "mc_sim_7b_63": _MC_SIM_7B_63,
    }
)
"""Trees that have a name, as Medusa choices; the small ones are the first nodes of the large one."""
