"""Spoilt files of weights, each with the words that its error must hold."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bad_configs import Case, large
from good_folders import WEIGHTS, edit_tensors, faster_tensors, make_faster, make_ours, make_vllm
from safetensors.torch import save_file

PICKLE = "medusa_lm_head.pt"
INDEX = "model.safetensors.index.json"
NAN, INF = float("nan"), float("inf")


def tensors(**changes: Any) -> Callable[[Path], Any]:
    """model.safetensors with tensors changed, see `edit_tensors`."""
    return lambda folder: edit_tensors(folder, **changes)


def filled(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """One value of the tensor changed to this."""
    return lambda tensor: tensor.index_fill(0, torch.tensor([1]), value)


def cut(keep: int, file: str = WEIGHTS) -> Callable[[Path], Any]:
    """The file's first bytes; counted from its end if negative."""
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:keep])


def header(change: Callable[[dict[str, Any]], Any], tail: bytes = b"") -> Callable[[Path], Any]:
    """model.safetensors with its header changed, the values left as they are."""

    def spoil(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        changed = change(json.loads(data[8 : 8 + length]))
        written = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(written)) + written + data[8 + length :] + tail)

    return spoil


def told(name: str, **facts: Any) -> Callable[[Path], Any]:
    """What the header says of one tensor, changed."""
    return header(lambda found: found | {name: found[name] | facts})


def renamed(new: Callable[[str], str]) -> Callable[[Path], Any]:
    """Every tensor of the pickle under another name."""

    def spoil(folder: Path) -> None:
        torch.save({new(name): tensor for name, tensor in faster_tensors().items()}, folder / PICKLE)

    return spoil


def instead(make: Callable[[Path], Any], file: str = WEIGHTS) -> Callable[[Path], Any]:
    """Something else in place of the file."""

    def spoil(folder: Path) -> None:
        (folder / file).unlink()
        make(folder / file)

    return spoil


def index(content: Any) -> Callable[[Path], Any]:
    """An index of split weights beside them."""
    written = content if isinstance(content, str) else json.dumps(content)
    return lambda folder: (folder / INDEX).write_text(written)


def parts(file: str) -> Callable[[Path], Any]:
    """An index that names this file."""
    return index({"metadata": {}, "weight_map": {"root": WEIGHTS, "layers.0.weight": file}})


def pickled(content: Any) -> Callable[[Path], Any]:
    """The pickle of heads with this in it, as torch saves it."""
    return lambda folder: torch.save(content, folder / PICKLE)


class Runs:
    """Would make a file beside the folder on loading: `canary`, where the tests look for it."""

    def __init__(self, how: Callable[..., Any], *arguments: Any) -> None:
        self.how, self.arguments = how, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.how, self.arguments


def opcodes(folder: Path) -> None:
    """The oldest protocol, written by hand: system('touch canary')."""
    command = f"touch {folder.parent / 'canary'}"
    (folder / PICKLE).write_bytes(f"cposix\nsystem\n(S'{command}'\ntR.".encode())


def spoilt_archive(folder: Path) -> None:
    """torch's own archive, whose data.pkl was exchanged."""
    source = zipfile.ZipFile(io.BytesIO((folder / PICKLE).read_bytes()))
    evil = pickle.dumps(Runs(os.system, f"touch {folder.parent / 'canary'}"), protocol=2)
    with zipfile.ZipFile(folder / PICKLE, "w") as archive:
        for name in source.namelist():
            archive.writestr(name, evil if name.endswith("data.pkl") else source.read(name))


def old_tar(file: Path) -> None:
    """What the first versions of torch wrote."""
    with tarfile.open(file, "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            part = tarfile.TarInfo(name)
            content = pickle.dumps(Runs(os.system, f"touch {file.parent.parent / 'canary'}"), protocol=2)
            part.size = len(content)
            archive.addfile(part, io.BytesIO(content))


def compressed(file: Path) -> None:
    """An archive whose record grows a thousandfold."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + b"0" * 2**26)
        archive.writestr("archive/version", b"3\n")


def claims(tensor: torch.Tensor) -> Callable[[Path], Any]:
    """One tensor of the heads exchanged for one that is not what it says."""
    return pickled({**faster_tensors(), "0.1.weight": tensor})


def quantised(folder: Path) -> None:
    """A tensor of whole numbers that stand for others; torch warns that it will not make such any more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        claims(torch.quantize_per_tensor(torch.zeros(50, 16), 0.1, 0, torch.qint8))(folder)


def script(file: Path) -> None:
    """A compiled module: a program, not data."""
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), file)


def _ours(spoil: Callable[[Path], Any], says: str, by_values: bool = False) -> Case:
    return Case(make_ours, spoil, says, by_values)


def _vllm(spoil: Callable[[Path], Any], says: str, by_values: bool = False) -> Case:
    return Case(make_vllm, spoil, says, by_values)


def _pickle(spoil: Callable[[Path], Any], says: str, by_values: bool = False) -> Case:
    return Case(make_faster, spoil, says, by_values)


def system(file: str = PICKLE) -> Callable[[Path], Any]:
    """A pickle that runs a shell command."""
    return lambda folder: torch.save(
        {"0.0.linear.weight": Runs(os.system, f"touch {folder.parent / 'canary'}")}, folder / file
    )


def evaluated(folder: Path) -> None:
    """A pickle, not in an archive, that evaluates Python."""
    code = f"open({str(folder.parent / 'canary')!r}, 'w')"
    torch.save([Runs(eval, code)], folder / PICKLE, _use_new_zipfile_serialization=False)


WEIGHT_FILES: dict[str, Case] = {
    "weights missing": _ours(instead(lambda _: None), "holds no weights"),
    "weights empty": _ours(cut(0), WEIGHTS),
    "weights of four bytes": _ours(cut(4), WEIGHTS),
    "weights cut in the header": _ours(cut(100), WEIGHTS),
    "weights cut in the values": _ours(cut(-100), WEIGHTS),
    "weights with something behind them": _ours(header(lambda found: found, b"more"), WEIGHTS),
    "weights of random bytes": _ours(instead(lambda file: file.write_bytes(bytes(range(256)) * 9)), WEIGHTS),
    "a header longer than any file": _ours(instead(lambda f: f.write_bytes(struct.pack("<Q", 2**62) + b"{}")), WEIGHTS),
    "a header of gigabytes": _ours(instead(lambda f: f.write_bytes(struct.pack("<Q", 2**33) + b"{}" * 99)), WEIGHTS),
    "a header that is no JSON": _ours(header(lambda _: b"{{{{"), WEIGHTS),
    "a header nested beyond any stack": _ours(header(lambda _: b'{"a":' * 100_000), WEIGHTS),
    "a header that is a list": _ours(header(lambda _: [1]), WEIGHTS),
    "a tensor of another size than its values": _ours(told("root", shape=[3, 16, 17]), WEIGHTS),
    "a tensor larger than all memory": _ours(told("root", shape=[2**40, 2**20]), WEIGHTS),
    "a tensor whose size overflows": _ours(told("root", shape=[2**63, 2**63]), WEIGHTS),
    "a tensor of a negative size": _ours(told("root", shape=[-1, 16, 16]), WEIGHTS),
    "values that overlap": _ours(told("root", data_offsets=[0, 3072]), WEIGHTS),
    "values that end before they begin": _ours(told("root", data_offsets=[3072, 0]), WEIGHTS),
    "values outside the file": _ours(told("root", data_offsets=[2**50, 2**50 + 3072]), WEIGHTS),
    "a number format that nobody knows": _ours(told("root", dtype="F7"), WEIGHTS),
    "weights are a folder": _ours(instead(Path.mkdir), "is not a file"),
    "weights are a pipe": _ours(instead(os.mkfifo), "is not a file"),
    "weights are a link to nowhere": _ours(instead(lambda file: file.symlink_to("gone")), "is not a file"),
    "weights are a link to a device": _ours(instead(lambda file: file.symlink_to("/dev/zero")), "is not a file"),
    "weights are 16 gigabytes of zeros": _ours(instead(large), WEIGHTS),
    "weights are the pickle of another": _ours(instead(lambda f: torch.save(faster_tensors(), f)), WEIGHTS),
    "a value that is no number": _ours(tensors(root=filled(NAN)), "root=[3, 16, 16]: holds NaN", True),
    "an infinite value": _ours(tensors(layers__1__bias=filled(INF)), "layers.1.bias", True),
    "a negative infinity": _vllm(tensors(lm_heads__2__weight=filled(-INF)), "lm_heads.2.weight", True),
    "a tensor of another shape": _ours(tensors(root=lambda x: x[:2]), "root=[2, 16, 16]"),
    "a tensor without dimensions": _ours(tensors(root=torch.tensor(1.0)), "root=[]"),
    "a tensor with one dimension more": _ours(tensors(root=lambda x: x[None]), "root=[1, 3, 16, 16]"),
    "a tensor without values": _ours(tensors(root=torch.zeros(3, 0, 16)), "root=[3, 0, 16]"),
    "weights as whole numbers": _ours(tensors(root=lambda x: x.to(torch.int64)), "torch.int64", True),
    "weights as truths": _ours(tensors(layers__0__weight=lambda x: x > 0), "torch.bool", True),
    "weights as complex numbers": _ours(tensors(root=lambda x: x.to(torch.complex64)), "torch.complex64", True),
    "weights in 8 bits without a scale": _ours(tensors(root=lambda x: x.to(torch.float8_e4m3fn)), "their scale", True),
    "a map of truths": _ours(tensors(token_map=lambda x: x > 0), "token_map", True),
    "a map of fractions": _ours(tensors(token_map=lambda x: x.float()), "token_map", True),
    "a map of complex numbers": _ours(tensors(token_map=lambda x: x.to(torch.complex64)), "token_map", True),
    "a map beyond the vocabulary": _ours(tensors(token_map=lambda x: x + 31), "token_map=50", True),
    "a map below the vocabulary": _ours(tensors(token_map=lambda x: x - 1), "token_map=-1", True),
    "a map that says a token twice": _ours(tensors(token_map=lambda x: x // 2), "appears twice", True),
    "a tensor is missing": _ours(tensors(layers__1__weight=None), "layers.1.weight"),
    "a tensor too many": _ours(tensors(layers__2__weight=torch.zeros(3, 16, 16)), "layers.2.weight"),
    "a tensor with line ends in its name": _ours(tensors(**{"a\nb\x1b[2J": torch.zeros(1)}), r"a\nb\x1b[2J"),
    "an index that points above": _ours(parts("../model.safetensors"), "lies outside"),
    "an index that points to an absolute path": _ours(parts("/etc/passwd"), "lies outside"),
    "an index that names a missing part": _ours(parts("model-00002-of-00002.safetensors"), "is missing"),
    "an index that names a part by 3000 letters": _ours(parts("x" * 3000), "is missing"),
    "an index whose map is a list": _ours(index({"weight_map": [WEIGHTS]}), "weight_map"),
    "an index without a map": _ours(index({}), "weight_map"),
    "an index whose map holds numbers": _ours(index({"weight_map": {"root": 1}}), "weight_map"),
    "an index cut short": _ours(index('{"weight_map": {'), "is not JSON"),
    "an index that is a link to nowhere": _ours(lambda f: (f / INDEX).symlink_to("gone"), "link to nowhere"),
    "a head missing between others": _vllm(
        tensors(blocks__1__layers__0__weight=None, blocks__1__layers__0__bias=None), "blocks.1.layers.0.weight"
    ),
    "an unembedding of another size": _vllm(tensors(lm_heads__1__weight=torch.zeros(9, 16)), "lm_heads.1.weight"),
    "no heads among the tensors": _vllm(instead(lambda f: save_file({"x": torch.zeros(2)}, f)), "like a Medusa head"),
    "pickle: a shell command": _pickle(system(), PICKLE),
    "pickle: evaluated Python": _pickle(evaluated, PICKLE),
    "pickle: a command by hand": _pickle(opcodes, PICKLE),
    "pickle: an archive whose program was exchanged": _pickle(spoilt_archive, PICKLE),
    "pickle: the oldest archive": _pickle(instead(old_tar, PICKLE), PICKLE),
    "pickle: a whole module": _pickle(pickled(torch.nn.Linear(2, 2)), PICKLE),
    "pickle: a compiled module": _pickle(instead(script, PICKLE), PICKLE),
    "pickle: a command in a .bin": _pickle(
        lambda f: (instead(lambda _: None, PICKLE)(f), system("pytorch_model.bin")(f)), "pytorch_model.bin"
    ),
    "pickle: empty": _pickle(cut(0, PICKLE), PICKLE),
    "pickle: cut short": _pickle(cut(700, PICKLE), PICKLE),
    "pickle: cut at its end": _pickle(cut(-30, PICKLE), PICKLE),
    "pickle: text": _pickle(instead(lambda file: file.write_text("see the other repository"), PICKLE), PICKLE),
    "pickle: an archive of something else": _pickle(instead(compressed, PICKLE), PICKLE),
    "pickle: a list": _pickle(pickled([torch.zeros(2)]), "dictionary of tensors"),
    "pickle: one tensor": _pickle(pickled(torch.zeros(2)), "dictionary of tensors"),
    "pickle: numbers for names": _pickle(pickled({3: torch.zeros(2)}), "like a Medusa head"),
    "pickle: numbers for tensors": _pickle(pickled({"0.0.linear.weight": 1.0}), "like a Medusa head"),
    "pickle: names of 5000 digits": _pickle(renamed(lambda name: "9" * 5000 + name), "like a Medusa head"),
    "pickle: heads from 1 on": _pickle(renamed(lambda name: f"{int(name[0]) + 1}{name[1:]}"), "blocks.0.layers.0"),
    "pickle: a tensor of one value that claims terabytes": _pickle(claims(torch.zeros(1).expand(2**36, 16)), "claims"),
    "pickle: a sparse tensor": _pickle(claims(torch.zeros(50, 16).to_sparse()), "no plain tensor"),
    "pickle: a tensor without values": _pickle(claims(torch.zeros(50, 16, device="meta")), "no plain tensor"),
    "pickle: a quantised tensor": _pickle(quantised, "no plain tensor"),
    "pickle: a pipe": _pickle(instead(os.mkfifo, PICKLE), "is not a file"),
    "pickle: a value that is no number": _pickle(claims(torch.full((50, 16), NAN)), "holds NaN", True),
}
