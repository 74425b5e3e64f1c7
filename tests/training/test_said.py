"""The teacher is the target: what is read from a model's files gives the logits of transformers, for every kind."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_targets import MODELS, SIZES, VOCAB, save_model

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.target import Target, read_target
from vllm_medusa.proposer import _matrices
from vllm_medusa.training.hidden import HiddenRows, RowWriter
from vllm_medusa.training.said import Said, check_target
from vllm_medusa.training.teacher import make_teacher

KINDS = ("llama", "granite", "cohere", "gemma2", "gpt_neox", "gptj")


@pytest.mark.parametrize("kind", KINDS)
def test_the_teacher_is_the_target(tmp_path: Path, kind: str) -> None:
    model, rows, logits = asked(kind, tmp_path / "model")
    target = read_target(tmp_path / "model")
    torch.testing.assert_close(target.logits(rows.float()), logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(target.embedding, model.get_input_embeddings().weight)
    for ours, served in zip(target.matrices, _matrices(model), strict=True):  # the same question to its modules
        assert torch.equal(ours, served)
    # What heads learn from: the target's probabilities, of some tokens only among these.
    teacher = make_teacher(target, None, stored(rows, tmp_path / "store"), tmp_path)
    wanted = logits.softmax(-1).gather(1, torch.tensor(teacher.tokens.astype(np.int64)))
    torch.testing.assert_close(torch.tensor(teacher.shares).float(), wanted, rtol=2e-3, atol=1e-4)
    few = torch.tensor([3, 5, 50])
    teacher = make_teacher(target, few, stored(rows, tmp_path / "store"), tmp_path)
    among = logits[:, few].softmax(-1).gather(1, torch.tensor(teacher.tokens.astype(np.int64)))
    torch.testing.assert_close(torch.tensor(teacher.shares).float(), among, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_head_that_is_read_wrongly_is_noticed(tmp_path: Path, kind: str) -> None:
    """By what the target itself said of a few rows: whatever models do to their logits that we do not know of."""
    _, rows, logits = asked(kind, tmp_path / "model")
    target = read_target(tmp_path / "model")
    Said.of(rows, logits).save(tmp_path)
    check_target(target, tmp_path, kind)
    check_target(target.to("cpu", torch.bfloat16), tmp_path, kind)
    wrong = Target(*target.matrices)
    if kind == "gpt_neox":  # nothing is done to its logits; but it does not tie its two matrices
        wrong = Target(target.embedding, target.embedding)
    with pytest.raises(MedusaError, match=rf"model='{kind}': vLLM's logits are not .*--loss ce"):
        check_target(wrong, tmp_path, kind)


def test_a_store_that_does_not_tell_is_believed(tmp_path: Path) -> None:
    """Rows of an earlier version serve still."""
    check_target(Target(torch.eye(4), torch.eye(4)), tmp_path, "toy")


def test_what_is_done_to_logits_is_part_of_what_is_kept(tmp_path: Path) -> None:
    """A teacher that was asked of another reading of the same model is not taken for this one's."""
    rows = stored(torch.randn(20, 4).bfloat16(), tmp_path / "store")
    table = torch.randn(8, 4)
    plain = make_teacher(Target(table, table), None, rows, tmp_path)
    for other in ({"scale": 0.25}, {"soft_cap": 1.0}, {"bias": torch.arange(8.0)}):
        found: Any = make_teacher(Target(table, table, **other), None, rows, tmp_path)
        assert not np.array_equal(found.shares, plain.shares)


def asked(kind: str, folder: Path) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A saved model of a kind, rows of it after the final norm, bfloat16 [40, H], and its logits there."""
    save_model(kind, folder)
    sizes = dict(SIZES)
    torch.manual_seed(7)
    model = MODELS[kind](sizes).eval()
    tokens = torch.randint(2, VOCAB, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        rows = model.base_model(tokens).last_hidden_state[0].bfloat16()
        # Through all that the model does behind its last norm, on rows as they are stored.
        taken = model.base_model.register_forward_hook(
            lambda *given: type(given[-1])(last_hidden_state=rows.float()[None])
        )
        logits = model(tokens).logits[0]
        taken.remove()
    return model, rows, logits


def stored(rows: torch.Tensor, folder: Path) -> HiddenRows:
    writer = RowWriter(folder, rows.shape[1])
    writer.append([0] * len(rows), list(range(len(rows))), list(range(len(rows))), rows)
    writer.close()
    return HiddenRows.open([folder])
