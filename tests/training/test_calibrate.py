"""Calibration on guesses whose truth we choose: temperatures, accuracies and errors are what they must be."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.training.calibrate import calibrate, fit_temperatures, guess
from vllm_medusa.training.hidden import HiddenRows

HIDDEN = VOCAB = 16


def sampled_rows(record: Callable[..., HiddenRows], answers: int, temperature: float, seed: int) -> HiddenRows:
    """Answers whose every token is drawn from softmax(the row before it / temperature).

    With the identity as unembedding, untrained heads say softmax(row): head 0's right temperature is `temperature`.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens, rows = [], []
    for _ in range(answers):
        hidden = 3 * torch.randn(30, HIDDEN, generator=generator)
        drawn = torch.multinomial((hidden.bfloat16().float() / temperature).softmax(1), 1, generator=generator)
        tokens.append([0, *drawn[:-1, 0].tolist()])
        rows.append(hidden)
    return record(tokens, rows)


def untrained(**options: int) -> MedusaHeads:
    heads = MedusaHeads(
        HeadsConfig(num_heads=1, num_layers=1, hidden_size=HIDDEN, vocab_size=VOCAB, top_k=5, **options)
    )
    heads.bind(torch.eye(VOCAB), torch.eye(VOCAB))
    return heads.requires_grad_(False)


@pytest.mark.parametrize("temperature", [0.2, 0.7, 1.0, 2.0, 6.0])
def test_the_temperature_that_made_the_answers_is_found(record: Callable[..., HiddenRows], temperature: float) -> None:
    calibration = calibrate(untrained(), sampled_rows(record, 150, temperature, 1))
    # 4350 draws fix it to a few percent; the grid's steps are 5 percent.
    assert calibration.temperatures[0] == pytest.approx(temperature, rel=0.12)


def test_calibration_mends_overconfidence(record: Callable[..., HiddenRows]) -> None:
    calibration = calibrate(untrained(), sampled_rows(record, 150, 2.0, 2))
    assert calibration.ece_before is not None and calibration.ece_after is not None
    assert calibration.ece_before[0] > 0.1 > 3 * calibration.ece_after[0]


def test_rank_accuracy_counts_what_came(record: Callable[..., HiddenRows]) -> None:
    rows = sampled_rows(record, 40, 1.0, 3)
    found = calibrate(untrained(), rows).rank_accuracy
    hidden = rows.gather(np.arange(len(rows))).float()
    order = hidden.argsort(1, descending=True)[:, :5]
    targets = rows.targets(1)[:, 0]
    known = targets >= 0
    wanted = [float((order[:, rank].numpy() == targets)[known].mean()) for rank in range(5)]
    # Rows are bfloat16: of two equal entries either may come first.
    assert found[0] == pytest.approx(wanted, abs=3e-3)
    assert sum(found[0]) <= 1.0


def test_probabilities_are_those_that_serving_will_see(record: Callable[..., HiddenRows]) -> None:
    heads, rows = untrained(), sampled_rows(record, 5, 1.0, 4)
    guesses = guess(heads, rows, 5, fit_temperatures(heads, rows, 5))
    heads.config = heads.config.model_copy(update={"calibration": calibrate(heads, rows)})
    heads.bind(torch.eye(VOCAB), torch.eye(VOCAB))
    served = heads.candidates(rows.gather(np.arange(len(rows))).float(), None, 5)
    np.testing.assert_allclose(served.probabilities.numpy(), guesses.probabilities, rtol=1e-5, atol=1e-6)
    steps = np.diff(guesses.probabilities, axis=2) < -1e-6
    apart = np.pad(steps, ((0, 0), (0, 0), (1, 0)), constant_values=True) & np.pad(steps, ((0, 0), (0, 0), (0, 1)))
    np.testing.assert_array_equal(served.tokens.numpy()[apart], guesses.tokens[apart])  # the others tie


def test_tokens_outside_the_draft_vocabulary_are_misses(record: Callable[..., HiddenRows]) -> None:
    heads = untrained(draft_vocab_size=8)  # tokens 0 to 7 of 16
    calibration = calibrate(heads, record([[1, 12, 13, 14, 15, 12]] * 4))
    assert calibration.rank_accuracy[0] == [0.0] * 5
    assert 0.01 <= calibration.temperatures[0] <= 100.0
