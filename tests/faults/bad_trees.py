"""Trees of every broken kind, as the content of a .json file, each with the words that its error must hold."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class TreeCase(NamedTuple):
    """A file of Medusa choices with one mistake; `text` is None where it is no text at all."""

    text: str | None
    write: Callable[[Path], Any]
    says: str


def said(text: str, says: str) -> TreeCase:
    """A mistake in what the file says."""
    return TreeCase(text, lambda file: file.write_text(text, encoding="utf-8"), says)


def made(write: Callable[[Path], Any], says: str) -> TreeCase:
    """A mistake in what the file is."""
    return TreeCase(None, write, says)


# For heads three deep, of five candidates each.
TREES: dict[str, TreeCase] = {
    "empty": said("[]", "the tree is empty"),
    "of one empty path": said("[[]]", "at least one rank"),
    "with an empty path among others": said("[[0], [], [1]]", "at least one rank"),
    "with a gap": said("[[0], [1, 0]]", "add the path it goes through, [1]"),
    "with a gap two levels up": said("[[0, 0, 0]]", "add the path it goes through, [0, 0]"),
    "with a path twice": said("[[0], [1], [0]]", "tree=[0]: the same path is listed twice"),
    "with every path twice": said("[[0], [0], [1], [1]]", "listed twice"),
    "deeper than the heads": said("[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]", "there are 3 heads"),
    "of one path of a thousand": said("[" + str([0] * 1000) + "]", "there are 3 heads"),
    "wider than the candidates": said("[[0], [5]]", "offers 5 candidates"),
    "of a rank beyond 64 bits": said("[[18446744073709551616]]", "offers 5 candidates"),
    "of a rank of 400 digits": said("[[" + "9" * 400 + "]]", "400 digits"),
    "of a rank of 5000 digits": said("[[" + "9" * 5000 + "]]", "5000 digits"),
    "of more nodes than fit": said(str([[0]] * 129), "at most 128 nodes"),
    "of a hundred thousand nodes": said("[" + ",".join(["[0]"] * 100_000) + "]", "at most 128 nodes"),
    "of negative ranks": said("[[-1]]", "tree=[-1]: ranks are whole numbers"),
    "of fractions": said("[[0.5]]", "tree=[0.5]: ranks are whole numbers"),
    "of whole fractions": said("[[0.0], [1.0]]", "tree=[0.0]: ranks are whole numbers"),
    "of exponents": said("[[1e0]]", "ranks are whole numbers"),
    "of ranks without end": said("[[1e999]]", "tree=[inf]: ranks are whole numbers"),
    "of what is no number": said("[[NaN]]", "tree=[nan]: ranks are whole numbers"),
    "of truths": said("[[true]]", "tree=[True]: ranks are whole numbers"),
    "of falsehoods": said("[[false]]", "tree=[False]: ranks are whole numbers"),
    "of digits as text": said('[["0"]]', "tree=['0']: ranks are whole numbers"),
    "of nothing": said("[[null]]", "tree=[None]: ranks are whole numbers"),
    "of lists in lists": said("[[[0]]]", "tree=[[0]]: ranks are whole numbers"),
    "of objects": said('[{"0": 1}]', "a path is a list of ranks"),
    "of numbers": said("[0, 1]", "tree=0: a path is a list of ranks"),
    "of text": said('["0", "00"]', "tree='0': a path is a list of ranks"),
    "an object": said('{"tree": [[0]]}', "give a list of paths"),
    "an object with a key twice": said('{"a": [[0]], "a": [[1]]}', "'a' twice"),
    "a number": said("63", "give a list of paths"),
    "a text": said('"mc_sim_7b_63"', "give a list of paths"),
    "nothing": said("null", "give a list of paths"),
    "no JSON": said("[[0], ", "is not JSON"),
    "Python": said("[[0], (0, 0)]", "is not JSON"),
    "with a comma too many": said("[[0],]", "is not JSON"),
    "followed by another": said("[[0]] [[1]]", "is not JSON"),
    "nested beyond any stack": said("[" * 60_000 + "]" * 60_000, "nested"),
    "nested a hundred deep": said("[" * 100 + "0" + "]" * 100, "nested"),
    "an empty file": said("", "is not JSON"),
    "with a byte order mark": said("\ufeff[[0]]", "byte order mark"),
    "in UTF-16": made(lambda file: file.write_bytes("[[0]]".encode("utf-16")), "UTF-8"),
    "with a terminal's escape": said('["\\u001b[2J"]', "control characters"),
    "a missing file": made(lambda file: None, "does not exist"),
    "a folder": made(Path.mkdir, "is not a file"),
    "a pipe": made(os.mkfifo, "is not a file"),
    "a link to nowhere": made(lambda file: file.symlink_to("gone"), "link to nowhere"),
    "a link to a device": made(lambda file: file.symlink_to("/dev/zero"), "is not a file"),
    "gigabytes": made(lambda file: (file.touch(), os.truncate(file, 2**33)), "too large"),
}
