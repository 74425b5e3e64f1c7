"""The model card says what the heads are and how they were made, in words that fit."""

import pytest

from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.training.card import model_card


def card(training: dict[str, object] | None = None, notes: str = "", **options: object) -> str:
    shape = {"num_heads": 4, "num_layers": 2, "hidden_size": 8, "vocab_size": 50, "base_model": "some/model"}
    return model_card(HeadsConfig(**{**shape, "training": training, **options}), notes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "4 plain heads of 2 residual blocks each"),
        ({"num_layers": 1, "root_conditioned": True}, "4 root-conditioned heads of 1 residual block each"),
        (
            {"num_layers": 0, "root_conditioned": True, "trunk_size": 16},
            "4 root-conditioned heads on a shared layer of 16 features",
        ),
    ],
)
def test_the_kind_of_heads(options: dict[str, object], words: str) -> None:
    assert f"\n{words}, for use" in card(**options)


def test_how_they_were_made() -> None:
    text = card(
        {
            "loss": "mixed",
            "self_prompts": 500,
            "training_tokens_by_temperature": {"at temperature 0": 900, "at temperature 0.7": 100},
            "training_tokens": 1000,
            "accepted_length": {"gsm8k": {"chain": 1.8, "dynamic-8": 2.25}},
        },
        notes="## More",
    )
    assert "prompts (500 of them it had invented itself) at temperature 0 and at temperature 0.7 through vLLM" in text
    assert "learnt half the tokens that followed" in text
    assert "| training tokens | 1000 |" in text and "{" not in text.split("## How they were made")[1]
    assert "| answers to | chain | dynamic-8 |" in text and "| gsm8k | 1.80 | 2.25 |" in text
    assert text.endswith("## More\n")


def test_heads_of_unknown_origin_get_a_card_too() -> None:
    assert "# Medusa heads for some/model" in card()


@pytest.mark.parametrize(
    ("served", "words"),
    [
        ({"replayed": 2.0, "served": 1.95, "prompts": 32}, "1.95 tokens a step in vLLM, 2.00 replayed, on 32 prompts."),
        ({"replayed": 2.0, "served": 1.8, "prompts": 32}, "THEY DIFFER"),
        ({"failed": "no memory"}, "Not compared with serving: no memory."),
    ],
)
def test_what_serving_brought(served: dict[str, object], words: str) -> None:
    text = card({"served": served})
    assert words in text and ("DIFFER" in words) == ("DIFFER" in text)
