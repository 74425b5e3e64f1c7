"""The whole of `train` on a toy target, the engine replaced: a folder that serves, a card, no mixed-up rows."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.checkpoint import load_heads, read_config
from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.training import recorded, run
from vllm_medusa.training.answering import AnswerOptions
from vllm_medusa.training.conversation import Conversation
from vllm_medusa.training.hidden import RowWriter
from vllm_medusa.training.options import TrainOptions, parse_temperatures
from vllm_medusa.training.run import train
from vllm_medusa.training.step import LoopOptions

VOCAB, HIDDEN = 24, 16


class Numbers:
    """A chat template for prompts that are numbers."""

    def ask(self, prompt: Conversation, answers: Sequence[Sequence[int]] = ()) -> list[int] | None:
        return None if answers else [int(prompt.key)]


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: torch.Tensor) -> TrainOptions:
    """A toy target on disk, prompts that are numbers, and a recorder that counts on from them by threes."""

    def record(prompts: Sequence[list[int]], folder: Path, *_: Any, **__: Any) -> list[Path]:
        shard = folder / "shard-0000"
        writer, generator = RowWriter(shard, HIDDEN), torch.Generator().manual_seed(len(prompts))
        for number, prompt in enumerate(prompts):
            tokens = [(prompt[0] + 3 * i) % VOCAB for i in range(12)]
            hidden = target[torch.tensor(tokens)] + 0.1 * torch.randn(12, HIDDEN, generator=generator)
            writer.append([number] * 12, list(range(12)), tokens, hidden)
        writer.close()
        facts = {"prompts": len(prompts), "tokens": 12 * len(prompts), "temperature": 0.0, "seconds": 1.0}
        (shard / "done.json").write_text(json.dumps(facts))
        return [shard]

    monkeypatch.setattr(recorded, "record_answers", record)
    monkeypatch.setattr(recorded, "open_chat", lambda _: Numbers())
    monkeypatch.setattr(recorded, "render_prompts", lambda _, prompts: [[int(prompt)] for prompt in prompts])
    model = tmp_path / "model"
    model.mkdir()
    save_file({"model.embed_tokens.weight": target}, model / "model.safetensors")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": str(number)}) + "\n" for number in range(100)))
    return TrainOptions(
        model=str(model),
        prompts=prompts,
        out=tmp_path / "heads",
        base_model="toy",
        held_out=20,
        num_heads=2,
        trunk_size=32,
        draft_vocab_size=20,
        loop=LoopOptions(epochs=20, batch_size=64, learning_rate=5e-3),
    )


def test_train_writes_heads_that_serve_and_say_how_good_they_are(options: TrainOptions, target: torch.Tensor) -> None:
    folder = train(options)
    config = read_config(folder)
    assert (config.num_heads, config.num_layers, config.trunk_size, config.draft_vocab_size) == (2, 0, 32, 20)
    assert config.calibration is not None and config.calibration.rows == 20 * 12
    assert config.training is not None
    assert config.training["training_tokens"] == 80 * 12 and config.training["held_out_prompts"] == 20
    assert 0.5 < config.training["draft_vocab_coverage"] <= 1.0
    card = _card(folder)
    assert "toy" in card and f"{config.calibration.rank_accuracy[0][0]:.3f}" in card
    heads = load_heads(folder)
    heads.bind(target.bfloat16(), target.bfloat16())
    start = torch.arange(VOCAB)
    tokens, _ = heads.candidates(target.bfloat16(), start, 1)
    right = (tokens[:, 0, 0] == (start + 3) % VOCAB).float().mean()
    assert right > 0.6  # four of 24 tokens are outside the draft vocabulary


def test_prompts_to_evaluate_on_are_replayed_and_never_learnt_from(options: TrainOptions) -> None:
    file = options.prompts.with_name("test_set.jsonl")  # type: ignore[union-attr]
    file.write_text("".join(json.dumps({"turns": [str(number)]}) + "\n" for number in range(90, 110)))
    notes = options.out.with_name("notes.md")
    notes.write_text("## What was tried")
    folder = train(replace(options, evaluate=(file,), notes=notes))
    training = read_config(folder).training
    assert training is not None
    assert training["training_prompts"] == 70  # ten of the twenty are prompts 90 to 99 of the training file
    assert set(training["accepted_length"]) == {"held-out prompts", "test_set"}
    card = _card(folder)
    assert "| test_set |" in card and card.rstrip().endswith("## What was tried")


def test_plain_heads_are_trained_on_the_same_rows(options: TrainOptions) -> None:
    train(options)
    folder = train(
        replace(options, root_conditioned=False, out=options.out.with_name("plain"), work=options.rows_folder)
    )
    config = read_config(folder)
    assert (config.root_conditioned, config.trunk_size, config.num_layers) == (False, None, 2)


@pytest.mark.parametrize("unembedding", ["shared", "per_head"])
def test_an_unembedding_of_their_own_is_learnt_saved_and_served(
    options: TrainOptions, target: torch.Tensor, monkeypatch: pytest.MonkeyPatch, unembedding: Any
) -> None:
    taught: list[MedusaHeads] = []
    real = run.finish

    def finish(heads: MedusaHeads, *rest: Any) -> HeadsConfig:
        taught.append(heads)
        return real(heads, *rest)

    monkeypatch.setattr(run, "finish", finish)
    folder = train(replace(options, unembedding=unembedding))
    (heads,), loaded = taught, load_heads(folder)
    assert loaded.config.unembedding == unembedding and loaded.config == heads.config
    assert loaded.unembedding is not None and loaded.token_map is not None
    assert loaded.unembedding.shape == (1 if unembedding == "shared" else 2, 20, HIDDEN)
    assert not torch.equal(loaded.unembedding[0], target[loaded.token_map].bfloat16())
    # What was calibrated is what is served: on another target's unembedding too, for theirs is not asked.
    start = torch.arange(VOCAB)
    loaded.bind(torch.zeros_like(target).bfloat16(), target.bfloat16())
    heads.bind(target.bfloat16(), target.bfloat16())  # with the temperatures found meanwhile
    wanted = heads.candidates(target.bfloat16(), start, 5)
    for one, other in zip(loaded.candidates(target.bfloat16(), start, 5), wanted, strict=True):
        assert torch.equal(one, other)
    assert (wanted.tokens[:, 0, 0] == (start + 3) % VOCAB).float().mean() > 0.6
    assert f"one unembedding for {'all heads' if unembedding == 'shared' else 'each head'}" in _card(folder)
    # The target's distributions are its own, whatever the heads multiply with: asked once for every kind.
    asked = sorted((options.rows_folder).glob("teacher-*"))
    content = [file.read_bytes() for file in asked]
    for file in asked:
        file.unlink()
    train(replace(options, out=options.out.with_name("sharing"), work=options.rows_folder))
    assert sorted((options.rows_folder).glob("teacher-*")) == asked
    assert [file.read_bytes() for file in asked] == content


def _card(folder: Path) -> str:
    return (folder / "README.md").read_text()


def test_training_twice_gives_the_same_heads(options: TrainOptions) -> None:
    options = replace(options, loop=LoopOptions(epochs=2, batch_size=64))
    first, second = train(options), train(replace(options, out=options.out.with_name("again")))
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "change", [{"held_out": 30}, {"answers": AnswerOptions(max_new_tokens=99)}], ids=["split", "answers"]
)
def test_rows_made_in_another_way_are_not_mixed_in(options: TrainOptions, change: dict[str, Any]) -> None:
    options = replace(options, loop=LoopOptions(epochs=1))
    train(options)
    with pytest.raises(MedusaError, match="another work folder"):
        train(replace(options, **change))


def test_a_prompt_is_never_on_both_sides(options: TrainOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps({"prompt": str(number % 50)}) for number in range(100)]
    options.prompts.write_text("\n".join(lines))
    asked: list[list[int]] = []
    real = recorded.record_answers

    def spy(prompts: Sequence[list[int]], *rest: Any, **more: Any) -> list[Path]:
        asked.append([prompt[0] for prompt in prompts])
        return real(prompts, *rest, **more)

    monkeypatch.setattr(recorded, "record_answers", spy)
    train(replace(options, loop=LoopOptions(epochs=1)))
    held, learnt = asked
    assert len(held) == 20 and len(learnt) == 30 and not set(held) & set(learnt)


def test_too_few_prompts_are_named(options: TrainOptions) -> None:
    with pytest.raises(MedusaError, match="held out"):
        train(replace(options, held_out=100))


def test_a_model_that_is_no_folder_is_named(options: TrainOptions) -> None:
    with pytest.raises(MedusaError, match="model="):
        train(replace(options, model="nowhere"))


def test_a_small_vocabulary_is_guessed_whole(options: TrainOptions) -> None:
    folder = train(replace(options, draft_vocab_size=8192, loop=LoopOptions(epochs=1)))
    config = read_config(folder)
    assert (config.draft_vocab_size, config.num_outputs, config.top_k) == (None, VOCAB, 10)
    assert "They guess 24 tokens" in _card(folder)


def test_heads_that_cannot_be_are_named_before_the_target_answers(options: TrainOptions) -> None:
    with pytest.raises(MedusaError, match="num_layers of at least 1 or a trunk_size"):
        train(replace(options, num_layers=0, trunk_size=None))
    assert not options.rows_folder.exists()


def test_prompts_and_texts_together_are_refused(options: TrainOptions) -> None:
    for change in ({"prompts": None}, {"texts": options.prompts}):
        with pytest.raises(MedusaError, match="give prompts"):
            train(replace(options, **change))


@pytest.mark.parametrize("text", ["", "0,,1", "warm", "-1", "0,0", "9"])
def test_temperatures_that_cannot_be_are_named(text: str) -> None:
    with pytest.raises(MedusaError, match="temperatures="):
        parse_temperatures(text)
