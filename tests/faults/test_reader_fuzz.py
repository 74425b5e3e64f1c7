"""Readers of heads and trees under files that nobody would write: they load or refuse, and do nothing else.

A few hundred files of each kind, the same in every run; `MEDUSA_LONG=1` goes on with others for ten minutes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from good_folders import WEIGHTS, faster_tensors, listing, make_faster, make_ours, make_tgi, make_vllm
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from mutations import Bases, spoilt_bytes, spoilt_header, spoilt_json
from rich.console import Console

from vllm_medusa.config import MedusaConfig, resolve
from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.checkpoint import load_heads
from vllm_medusa.inspection import show_heads

LONG = os.environ.get("MEDUSA_LONG") == "1"
EXAMPLES, SECONDS = 150, 150.0  # of each kind: in CI, and in the long run
# A file of a few kilobytes may cost this much at most: more was promised by the file, and believed.
MOST_BYTES, MOST_SECONDS = 64 * 2**20, 10.0
PICKLE = "medusa_lm_head.pt"
# What the interpreter tells its auditors, and no reader has any business with.
FORBIDDEN = frozenset(
    [
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.fork",
        "os.remove",
        "os.rename",
        "os.mkdir",
        "os.symlink",
        "os.link",
        "os.truncate",
        "subprocess.Popen",
        "socket.connect",
        "shutil.rmtree",
        "ctypes.dlopen",
    ]
)
_watching: list[list[str]] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching:
        return
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if event in FORBIDDEN or writes:
        _watching[-1].append(f"{event} {arguments}")


sys.addaudithook(_audit)


@contextmanager
def nothing_but_reading(folder: Path) -> Iterator[None]:
    """Nothing runs, nothing is written, memory and time stay small; an error that is let out is a user's."""
    before, began, done = listing(folder), time.process_time(), []
    peak = peak_bytes(anew=True)
    _watching.append(done)
    try:
        yield
    finally:
        _watching.pop()
    assert done == []
    assert listing(folder) == before
    assert peak_bytes() - peak < MOST_BYTES
    assert time.process_time() - began < MOST_SECONDS


def peak_bytes(anew: bool = False) -> int:
    """The most memory this process has held since it was last asked to look `anew`: earlier tests hold more."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def read(folder: Path) -> str:
    """Load, and show as `inspect` does: "loaded", or "refused" with one line."""
    with nothing_but_reading(folder):
        outcomes = []
        for reader in (load_heads, lambda heads: show_heads(str(heads), "static", None, Console(quiet=True))):
            try:
                reader(folder)
                outcomes.append("loaded")
            except MedusaError as error:
                message = str(error)
                assert message.startswith("medusa: ") and message.isprintable() and len(message) < 1000
                outcomes.append("refused")
    return outcomes[0]


def read_tree(file: Path, heads: int, top_k: int) -> str:
    """A tree from a file, as the settings name it."""
    with nothing_but_reading(file.parent):
        try:
            config, _ = MedusaConfig.parse({"model": "heads", "tree": str(file)})
            tree = resolve(
                config, "heads", num_heads=heads, top_k=top_k, rank_accuracy=None, default_nodes=8
            ).fixed_tree
            assert tree is not None and 1 <= tree.num_nodes <= 128 and tree.max_depth <= heads
            return "loaded"
        except MedusaError as error:
            assert str(error).isprintable()
            return "refused"


def run(strategy: st.SearchStrategy[Any], check: Callable[[Any], str]) -> Counter[str]:
    """Check examples: a fixed number, or for a while."""
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, print_blob=False, suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def examples(example: Any) -> None:
        outcomes[check(example)] += 1

    end, number = time.monotonic() + SECONDS, 0
    while number == 0 or (LONG and time.monotonic() < end):
        seed(number)(examples)()
        number += 1
    print(f"{sum(outcomes.values()):,} files: {dict(outcomes)}")
    assert outcomes["refused"] > outcomes["loaded"] // 20, "mutations that change nothing"
    return outcomes


def test_safetensors(tmp_path: Path) -> None:
    folders = {make.__name__: make(tmp_path / make.__name__) for make in (make_ours, make_vllm)}
    good = {name: (folder / WEIGHTS).read_bytes() for name, folder in folders.items()}

    def check(example: tuple[str, bytes]) -> str:
        name, data = example
        (folders[name] / WEIGHTS).write_bytes(data)
        return read(folders[name])

    files = st.one_of(spoilt_bytes(Bases(good.values())), spoilt_header(Bases(good.values())))
    run(st.tuples(st.sampled_from(sorted(folders)), files), check)


def test_pickles(tmp_path: Path) -> None:
    folder, bases = make_faster(tmp_path / "heads"), []
    shared = torch.randn(50, 16)
    for content in (faster_tensors(), faster_tensors() | dict.fromkeys(("0.1.weight", "1.1.weight"), shared)):
        for archive in (True, False):
            torch.save(content, folder / PICKLE, _use_new_zipfile_serialization=archive)
            bases.append((folder / PICKLE).read_bytes())

    def check(data: bytes) -> str:
        (folder / PICKLE).write_bytes(data)
        return read(folder)

    run(spoilt_bytes(Bases(bases)), check)


def test_configs(tmp_path: Path) -> None:
    folders = {make.__name__: make(tmp_path / make.__name__) for make in (make_ours, make_vllm, make_faster, make_tgi)}
    texts = [(folder / "config.json").read_bytes() for folder in folders.values()]
    values = [json.loads(text) for text in texts]

    def check(example: tuple[str, bytes | str]) -> str:
        name, content = example
        data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        (folders[name] / "config.json").write_bytes(data)
        return read(folders[name])

    run(
        st.tuples(st.sampled_from(sorted(folders)), st.one_of(spoilt_bytes(Bases(texts)), spoilt_json(Bases(values)))),
        check,
    )


def test_trees_and_indices(tmp_path: Path) -> None:
    folder, trees = make_ours(tmp_path / "heads"), tmp_path / "trees"
    trees.mkdir()
    values = [[[0], [1], [0, 0], [0, 1], [2], [0, 0, 0]], [[0]], [[0], [1]]]
    index = {"metadata": {"total_size": 1}, "weight_map": {"root": WEIGHTS, "layers.0.weight": WEIGHTS}}
    texts = [json.dumps(value).encode() for value in values]

    def check(example: tuple[str, bytes | str]) -> str:
        kind, content = example
        data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        if kind == "index":
            (folder / f"{WEIGHTS}.index.json").write_bytes(data)
            return read(folder)
        (trees / "tree.json").write_bytes(data)
        return read_tree(trees / "tree.json", 3, 5)

    tree_files = st.tuples(st.just("tree"), st.one_of(spoilt_bytes(Bases(texts)), spoilt_json(Bases(values))))
    index_files = st.tuples(
        st.just("index"), st.one_of(spoilt_bytes(Bases([json.dumps(index).encode()])), spoilt_json(Bases([index])))
    )
    run(st.one_of(tree_files, index_files), check)


def test_the_watch_sees_what_it_must(tmp_path: Path) -> None:
    """Each of its four eyes, with something to see."""
    deeds: dict[str, Callable[[], Any]] = {
        "running": lambda: os.system("true"),
        "writing": lambda: (tmp_path / "new").write_text("x"),
        "leaving": lambda: os.utime(tmp_path, (1, 1)) or os.mkfifo(tmp_path / "pipe"),
        "believing": lambda: torch.ones(2**26).sum(),
    }
    for name, deed in deeds.items():
        with pytest.raises(AssertionError), nothing_but_reading(tmp_path):
            deed()
            print(name)
