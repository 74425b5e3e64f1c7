"""The whole of `calibrate` on a toy target, the engine replaced: what it writes, and that it writes nothing else."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.checkpoint import load_heads, read_config, save_heads
from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.training import calibration_run
from vllm_medusa.training.calibration_picture import draw_calibration
from vllm_medusa.training.calibration_run import CalibrateOptions, run_calibration
from vllm_medusa.training.hidden import RowWriter

VOCAB, HIDDEN, ANSWER = 24, 16, 12


class ToyEngine:
    """Answers `collective_rpc` as the recording worker would."""

    started = 0

    def __init__(self, *_: Any) -> None:
        self.llm = self

    def __enter__(self) -> "ToyEngine":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def collective_rpc(self, method: str, kwargs: dict[str, list[int]]) -> list[list[float]]:
        assert method == "time_steps"
        ToyEngine.started += 1
        return [[0.01 + 1e-4 * size for size in kwargs["sizes"]]]


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: torch.Tensor) -> CalibrateOptions:
    """A toy target that says each token three times, all of them even, and heads that repeat, too sure of it."""

    def record(ids: Sequence[list[int]], folder: Path, *_: Any, on_progress: Any, **__: Any) -> list[Path]:
        shard = folder / "shard-0000"
        writer, generator = RowWriter(shard, HIDDEN), torch.Generator().manual_seed(len(ids))
        for number, (start, *_) in enumerate(ids):
            tokens = [(2 * start + 10 * (i // 3)) % VOCAB for i in range(ANSWER)]
            hidden = 0.4 * target[torch.tensor(tokens)] + 0.2 * torch.randn(ANSWER, HIDDEN, generator=generator)
            writer.append([number] * ANSWER, list(range(ANSWER)), tokens, hidden)
            on_progress(number, 0)
        writer.close()
        return [shard]

    monkeypatch.setattr(calibration_run, "record_answers", record)
    monkeypatch.setattr(calibration_run, "AnsweringEngine", ToyEngine)
    monkeypatch.setattr(
        calibration_run, "render_prompts", lambda _, prompts: [[int(prompt) % VOCAB] for prompt in prompts]
    )
    model = tmp_path / "model"
    model.mkdir()
    save_file({"model.embed_tokens.weight": target}, model / "model.safetensors")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": str(number)}) + "\n" for number in [*range(60), *range(60)]))
    config = HeadsConfig(
        num_heads=2, num_layers=1, hidden_size=HIDDEN, vocab_size=VOCAB, top_k=4, training={"epochs": 2}
    )
    heads = save_heads(MedusaHeads(config), tmp_path / "heads")
    (heads / "README.md").write_text("card")
    return CalibrateOptions(model=str(model), heads=str(heads), prompts=prompts, num_prompts=50)


def others(folder: Path) -> dict[str, bytes]:
    """Everything in the folder but its config.json."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "config.json"}


def test_only_the_calibration_in_the_config_changes(options: CalibrateOptions, target: torch.Tensor) -> None:
    folder = Path(options.heads)
    before, files = json.loads((folder / "config.json").read_text()), others(folder)
    report = run_calibration(options)
    after = json.loads((folder / "config.json").read_text())
    assert others(folder) == files
    assert {name: value for name, value in after.items() if name != "calibration"} == before
    calibration = read_config(folder).calibration
    assert calibration == report.calibration and calibration is not None
    assert calibration.rows == 50 * ANSWER
    assert calibration.ece_before is not None and calibration.ece_after is not None
    assert min(calibration.temperatures) > 1.2  # two tokens in three are the last one again, the heads say nearly all
    assert calibration.ece_after[0] < 0.7 * calibration.ece_before[0]
    heads = load_heads(folder)
    heads.bind(target, target)
    sure = float(heads.candidates(0.4 * target, None, 1).probabilities.max())
    assert sure < float((0.4 * target @ target.T).softmax(1).max())  # serving divides by the temperatures


def test_calibrating_again_gives_the_same(options: CalibrateOptions) -> None:
    first = run_calibration(options).calibration
    assert run_calibration(options).calibration == first


def test_the_report_is_consistent(options: CalibrateOptions, tmp_path: Path) -> None:
    report = run_calibration(replace(options, num_speculative_tokens=6))
    assert report.calibration.num_speculative_tokens == {"cpu": 6, "cuda": 63}
    assert read_config(options.heads).calibration == report.calibration
    assert report.tree.num_nodes == 6 and report.tree == report.tree.prefix(6)
    first = report.calibration.rank_accuracy[0]
    assert report.expected[1] == pytest.approx(1.0 + max(first))
    assert list(report.expected.values()) == sorted(report.expected.values())
    assert report.accepted["static-1"] > 1.3  # heads that repeat are right two times in three
    assert list(report.step_cost) == list(calibration_run.STEP_SIZES)
    best = report.rates()
    assert best[0] == pytest.approx(1 / 0.0101) and max(best, key=lambda nodes: best[nodes]) > 0
    report.write_json(tmp_path / "new" / "report.json")
    written = json.loads((tmp_path / "new" / "report.json").read_text())
    assert written["static_tree"]["nodes"] == len(written["static_tree"]["choices"]) == 6
    assert written["provenance"]["versions"]["torch"] and len(written["step_cost"]) == len(report.step_cost)
    for when in ("before", "after"):
        candidates = sum(row["candidates"] for row in written["reliability"][when])
        assert candidates == 4 * 50 * (2 * ANSWER - 3)  # head 2 has no target one row earlier


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture_is_drawn(options: CalibrateOptions, tmp_path: Path, ending: str) -> None:
    report = run_calibration(replace(options, measure_cost=ending == "png"))
    draw_calibration(report, tmp_path / "deep" / f"picture.{ending}")
    assert (tmp_path / "deep" / f"picture.{ending}").stat().st_size > 10_000
    with pytest.raises(MedusaError, match=r"out=.*\.gif"):
        draw_calibration(report, tmp_path / "picture.gif")


def test_step_times_are_left_out_if_asked(options: CalibrateOptions) -> None:
    ToyEngine.started = 0
    report = run_calibration(replace(options, measure_cost=False))
    assert ToyEngine.started == 0 and report.step_cost == {} and report.rates() == {}


def test_heads_that_others_wrote_are_calibrated_too(options: CalibrateOptions, tmp_path: Path) -> None:
    folder = tmp_path / "faster"
    folder.mkdir()
    said = {"medusa_num_heads": 5, "base_model_name_or_path": "lab/model"}
    (folder / "config.json").write_text(json.dumps(said))
    blocks = {f"{head}.0.linear.weight": torch.zeros(HIDDEN, HIDDEN) for head in range(2)}
    save_file(blocks, folder / "medusa_lm_head.safetensors")  # as TGI's second kind: the target's unembedding
    files = others(folder)
    report = run_calibration(replace(options, heads=str(folder)))
    config = read_config(folder)
    assert config.calibration == report.calibration and config.vocab_size == VOCAB
    assert others(folder) == files
    raw = json.loads((folder / "config.json").read_text())
    assert {key: raw[key] for key in said} == said


def test_answers_kept_for_a_second_try_are_not_mixed(options: CalibrateOptions, tmp_path: Path) -> None:
    for num_prompts in (50, 40):
        run_calibration(replace(options, work=tmp_path / "work", num_prompts=num_prompts))
    assert len(list((tmp_path / "work").iterdir())) == 2


def refused(options: CalibrateOptions, match: str) -> None:
    before = (Path(options.heads) / "config.json").read_bytes()
    with pytest.raises(MedusaError, match=match):
        run_calibration(options)
    assert (Path(options.heads) / "config.json").read_bytes() == before


def test_heads_that_are_never_right_are_named(options: CalibrateOptions) -> None:
    heads = MedusaHeads(read_config(options.heads).model_copy(update={"draft_vocab_size": 8}))
    assert heads.token_map is not None
    heads.token_map.copy_(torch.arange(1, 17, 2))  # odd tokens, which this target never says
    save_heads(heads, options.heads)
    refused(options, "never right")


def test_heads_of_another_size_are_named(options: CalibrateOptions) -> None:
    config = HeadsConfig(num_heads=2, num_layers=1, hidden_size=8, vocab_size=VOCAB, top_k=4)
    save_heads(MedusaHeads(config), options.heads)
    refused(options, "hidden_size")


def test_a_folder_that_cannot_be_written_is_named_before_the_work(
    options: CalibrateOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_run.os, "access", lambda *_: False)  # the tests may run as root
    monkeypatch.setattr(calibration_run, "record_answers", lambda *_, **__: pytest.fail("asked the target"))
    refused(options, "copy the folder")
