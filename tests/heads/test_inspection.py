"""What `inspect` tells: every kind of heads, calibrated or not, and the tree in the terminal and as a picture."""

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from foreign_folders import reference_heads, write_folder
from rich.console import Console

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.checkpoint import save_heads
from vllm_medusa.heads.config import Calibration
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.inspection import show_heads
from vllm_medusa.tree.drawing import plot
from vllm_medusa.tree.topology import Tree

Make = Callable[..., MedusaHeads]
CALIBRATION = Calibration(
    temperatures=[1.1, 1.2, 1.3],
    rank_accuracy=[[0.5, 0.2, 0.1, 0.05, 0.0]] * 3,
    ece_after=[0.011, 0.012, 0.013],
    num_speculative_tokens={"cpu": 9},
    rows=77,
)


def shown(folder: Path, tree: str = "static", nodes: int | None = None, picture: Path | None = None) -> str:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    show_heads(str(folder), tree, nodes, console, picture)
    return re.sub(r"[ \n]+", " ", console.file.getvalue())  # type: ignore[attr-defined]


def test_calibrated_heads_say_all_they_know(make_heads: Make, tmp_path: Path) -> None:
    facts = {"epochs": 2, "losses": [1.5, 2.5], "accepted_length": {"chat [1]": {"chain": 1.6, "dynamic-8": 1.9}}}
    options = {"root_conditioned": True, "draft_vocab_size": 20, "base_model": "lab/model"}
    heads = make_heads(**options, calibration=CALIBRATION, training=facts).to(torch.bfloat16)
    text = shown(save_heads(heads, tmp_path / "mine"), nodes=4)
    for part in (
        "vllm-medusa/1, bfloat16",
        "lab/model",
        "3 heads × 2 blocks, hidden 16",
        "reading the hidden row and the root token",
        "20 of 50 tokens",
        "9 (cpu) by default",
        "accepted length, chat [1] chain 1.6, dynamic-8 1.9",
        "losses 1.5, 2.5",
        "head 3 50.0% 20.0% 10.0% 5.0% 0.0% 85.0% 1.300 0.0130",
        "77 rows",
        "4 nodes",
        "measured accuracy",
        "'2.1' 25%",
        "2.08 tokens per step",  # 1 + .5 + .25 + .2 + .125, reach in order
    ):
        assert part in text, part


def test_heads_of_others_say_whose_they_are(tmp_path: Path) -> None:
    state = {name: tensor.half() for name, tensor in reference_heads().state_dict().items()}
    write_folder(tmp_path / "faster", {}, state, "medusa_lm_head.pt")
    text = shown(tmp_path / "faster")
    assert "FasterDecoding, float16" in text and "one each" in text and "not calibrated" in text
    blocks = {name: tensor for name, tensor in state.items() if "linear" in name}
    write_folder(tmp_path / "tgi", {}, blocks, "medusa_lm_head.safetensors")
    text = shown(tmp_path / "tgi")
    assert "TGI v2" in text and "vocabulary the target's" in text


def test_a_trunk_is_told(make_heads: Make, tmp_path: Path) -> None:
    heads = make_heads(root_conditioned=True, trunk_size=24, num_layers=0)
    assert "3 heads × 0 blocks on a trunk of 24, hidden 16" in shown(save_heads(heads, tmp_path))


@pytest.mark.parametrize("ending", ["svg", "png", "pdf"])
def test_the_tree_is_drawn(make_heads: Make, tmp_path: Path, ending: str) -> None:
    folder = save_heads(make_heads(calibration=CALIBRATION), tmp_path / "mine")
    picture = tmp_path / "new" / f"tree.{ending}"
    assert str(picture) in shown(folder, nodes=60, picture=picture).replace(" ", "")
    assert picture.stat().st_size > 3000


def test_a_picture_that_cannot_be_drawn_is_refused_first(make_heads: Make, tmp_path: Path) -> None:
    with pytest.raises(MedusaError, match=r"plot=.*tree\.bmp.*\.svg"):
        shown(tmp_path / "nowhere", picture=tmp_path / "tree.bmp")


def test_each_node_has_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node is drawn at its depth, one node to a place, with what its acceptance is."""
    from matplotlib.axes import Axes

    placed: list[tuple[str, tuple[float, float]]] = []
    annotate = Axes.annotate

    def spy(axis: Axes, text: str, place: tuple[float, float], *rest: object, **more: object) -> object:
        placed.append((text, place))
        return annotate(axis, text, place, *rest, **more)

    monkeypatch.setattr(Axes, "annotate", spy)
    tree = Tree((0, 1, 0, 1, 4))
    plot(tree, ["root", "a", "b", "c", "d", "e"], [0.5, 0.25, 0.2, 0.05, 0.004], tmp_path / "tree.svg")
    assert [text for text, _ in placed] == ["root", "a  50%", "b  25%", "c  20%", "d  5.0%", "e  0.4%"]
    assert [place[0] for _, place in placed] == list(tree.depths)
    assert len({place for _, place in placed}) == tree.num_rows
    with pytest.raises(ValueError, match="2 labels"):
        plot(tree, ["root", "a"], [0.5] * 5, tmp_path / "tree.svg")
