"""Spoilt config.json files, each with the words that its error must hold."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from good_folders import HEADS, edit_config, make_ours, make_tgi, make_vllm


class Case(NamedTuple):
    """A folder that is good but for one thing.

    Attributes:
        make: writes the good folder.
        spoil: does the one thing to it.
        says: what the error names.
        by_values: only those who read the values of the weights can see it.
    """

    make: Callable[[Path], Path]
    spoil: Callable[[Path], Any]
    says: str
    by_values: bool = False


def text(content: str | bytes) -> Callable[[Path], Any]:
    """config.json with this content."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / "config.json").write_bytes(data)


def keys(**changes: Any) -> Callable[[Path], Any]:
    """config.json with keys changed; infinities and NaN as Python spells them."""
    return lambda folder: edit_config(folder, **changes)


def inserted(member: str) -> Callable[[Path], Any]:
    """config.json with one more member, as text, at its beginning."""

    def spoil(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text("{" + member + ", " + file.read_text().lstrip()[1:])

    return spoil


def instead(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Something that is no file in place of config.json."""

    def spoil(folder: Path) -> None:
        (folder / "config.json").unlink()
        make(folder / "config.json")

    return spoil


def calibration(**changes: Any) -> Callable[[Path], Any]:
    """A calibration with values changed."""

    def spoil(folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text())
        edit_config(folder, calibration=raw["calibration"] | changes)

    return spoil


def nested(levels: int) -> str:
    """A list in a list in a list."""
    return '"x": ' + "[" * levels + "]" * levels


def large(file: Path) -> None:
    """A file of holes: nothing on the disk, too much in memory."""
    file.touch()
    os.truncate(file, 2**34)


def _ours(spoil: Callable[[Path], Any], says: str) -> Case:
    return Case(make_ours, spoil, says)


def _vllm(spoil: Callable[[Path], Any], says: str) -> Case:
    return Case(make_vllm, spoil, says)


CONFIGS: dict[str, Case] = {
    "config missing": _ours(instead(lambda _: None), "holds no config.json"),
    "config empty": _ours(text(""), "is not JSON"),
    "config cut short": _ours(text('{"num_heads": 3, '), "is not JSON"),
    "config with a comment": _ours(text('{} // "no"'), "is not JSON"),
    "config is a list": _ours(text("[1]"), "one JSON object"),
    "config is a number": _ours(text("3"), "one JSON object"),
    "config is null": _ours(text("null"), "one JSON object"),
    "config with a byte order mark": _ours(text("\ufeff{}"), "byte order mark"),
    "config in UTF-16": _ours(text("{}".encode("utf-16")), "UTF-8"),
    "config of random bytes": _ours(text(bytes(range(128, 256))), "UTF-8"),
    "config nested beyond any stack": _ours(text("[" * 200_000), "nested"),
    "config nested 200 deep": _ours(inserted(nested(200)), "nested"),
    "config of objects in objects": _ours(inserted('"x": ' + '{"x": ' * 500 + "1" + "}" * 500), "nested"),
    "config with a key twice": _ours(inserted('"num_heads": 4'), "'num_heads' twice"),
    "config with a key twice further in": _ours(inserted('"training": {"a": 1, "a": 1}'), "'a' twice"),
    "config with a number of 5000 digits": _ours(inserted('"x": ' + "9" * 5000), "5000 digits"),
    "config with half a surrogate pair": _ours(inserted(r'"x": "\ud800"'), "surrogate"),
    "config with an escape for the terminal": _ours(inserted(r'"x": "\u001b[2J"'), "control characters"),
    "config with line ends in a key": _ours(inserted(r'"a\nb": 1'), r"a\nb"),
    "config of 16 gigabytes": _ours(instead(large), "too large"),
    "config is a folder": _ours(instead(Path.mkdir), "is not a file"),
    "config is a pipe": _ours(instead(os.mkfifo), "is not a file"),
    "config is a link to nowhere": _ours(instead(lambda file: file.symlink_to("gone")), "link to nowhere"),
    "config is a link to itself": _ours(instead(lambda file: file.symlink_to("config.json")), "link to nowhere"),
    "config is a link to a device": _ours(instead(lambda file: file.symlink_to("/dev/zero")), "is not a file"),
    "config is a link to another kind of file": _ours(instead(lambda f: f.symlink_to(os.__file__)), "is not JSON"),
    "a later format": _ours(keys(format="vllm-medusa/9"), "format='vllm-medusa/9'"),
    "format is a list": _ours(keys(format=["vllm-medusa/1"]), "update vllm-medusa"),
    "another kind of model": _ours(keys(model_type="eagle"), "model_type='eagle'"),
    "an unknown key": _ours(keys(num_head=3), "num_head=3"),
    "no number of heads": _ours(keys(num_heads=None), "num_heads"),
    "heads as text": _ours(keys(num_heads="3"), "num_heads='3'"),
    "heads as a fraction": _ours(keys(num_heads=3.0), "num_heads=3.0"),
    "heads as a truth": _ours(keys(num_heads=True), "num_heads=True"),
    "heads as a list": _ours(keys(num_heads=[3]), "num_heads=[3]"),
    "no heads": _ours(keys(num_heads=0), "num_heads=0"),
    "too many heads": _ours(keys(num_heads=33), "num_heads=33"),
    "heads without end": _ours(keys(num_heads=float("inf")), "num_heads=inf"),
    "heads beyond 64 bits": _ours(keys(num_heads=10**30), "num_heads=1000"),
    "layers below none": _ours(keys(num_layers=-1), "num_layers=-1"),
    "a hidden size beyond 64 bits": _ours(keys(hidden_size=2**64), "hidden_size=18446744073709551616"),
    "a hidden size that overflows products": _ours(keys(hidden_size=2**40), "hidden_size=1099511627776"),
    "a vocabulary that overflows products": _ours(keys(vocab_size=2**62), "vocab_size=4611686018427387904"),
    "a vocabulary of one": _ours(keys(vocab_size=1), "vocab_size 1 is too small"),
    "a trunk that overflows products": _ours(keys(trunk_size=2**62), "trunk_size="),
    "a trunk that the weights do not have": _ours(keys(trunk_size=8), "asks for"),
    "a draft vocabulary beyond the whole": _ours(keys(draft_vocab_size=51), "exceeds vocab_size 50"),
    "more candidates than tokens": _ours(keys(top_k=21), "exceeds the 20 tokens"),
    "no candidates": _ours(keys(top_k=0), "top_k=0"),
    "a scale that is no number": _ours(keys(logit_scale=float("nan")), "logit_scale=nan"),
    "a scale beyond single precision": _ours(keys(logit_scale=1e300), "logit_scale=1e+300"),
    "a scale below single precision": _ours(keys(logit_scale=1e-300), "logit_scale=1e-300"),
    "bias as a number": _ours(keys(bias=1), "bias=1"),
    "an unembedding of another kind": _ours(keys(unembedding="mine"), "unembedding='mine'"),
    "a base model that is no text": _ours(keys(base_model=["lab/model"]), "base_model"),
    "training that is no object": _ours(keys(training="two epochs"), "training='two epochs'"),
    "calibration is a list": _ours(keys(calibration=[1.0]), "calibration=[1.0]"),
    "a calibration for fewer heads": _ours(calibration(temperatures=[1.0]), "per head"),
    "a temperature that is no number": _ours(calibration(temperatures=[float("nan")] * HEADS), "temperatures"),
    "a temperature of zero": _ours(calibration(temperatures=[0.0] * HEADS), "temperatures"),
    "a negative accuracy": _ours(calibration(rank_accuracy=[[-0.1] * 5] * HEADS), "rank_accuracy"),
    "ragged accuracies": _ours(calibration(rank_accuracy=[[0.1] * 5, [0.1], []]), "top_k=5"),
    "errors for fewer heads": _ours(calibration(ece_after=[0.1]), "ece_after"),
    "rows below none": _ours(calibration(rows=-5), "rows=-5"),
    "nodes out of range": _ours(calibration(num_speculative_tokens={"cpu": 0}), "between 1 and 128"),
    "nodes as text": _ours(calibration(num_speculative_tokens={"cpu": "8"}), "num_speculative_tokens.cpu='8'"),
    "vLLM's: heads as text": _vllm(keys(num_heads="3"), "num_heads='3'"),
    "vLLM's: more heads than weights": _vllm(keys(num_heads=4), "lm_heads.3.weight"),
    "vLLM's: layers beyond 64 bits": _vllm(keys(num_hidden_layers=10**30), "num_layers=1000"),
    "vLLM's: vocabulary as a truth": _vllm(keys(vocab_size=True), "vocab_size=True"),
    "vLLM's: a candidate count of none": _vllm(keys(topk=0), "top_k=0"),
    "vLLM's: a candidate count as a truth": _vllm(keys(topk=True), "top_k=True"),
    "vLLM's: a reduced vocabulary without its map": _vllm(keys(truncated_vocab_size=20), "token_map"),
    "vLLM's: a scale as text": _vllm(keys(logit_scale="1"), "logit_scale='1'"),
    "vLLM's: our part is no object": _vllm(keys(vllm_medusa="yes"), "vllm_medusa='yes'"),
    "vLLM's: our part is of other heads": _vllm(keys(vllm_medusa={"num_heads": 3}), "num_layers"),
    "TGI's: layers below none": Case(make_tgi, keys(medusa_num_layers=-1), "layers=-1"),
    "TGI's: a thousand million layers": Case(make_tgi, keys(medusa_num_layers=10**9), "num_layers=1000000000"),
}
