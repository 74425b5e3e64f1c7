"""SmolLM2 with the bundled heads, float32: token-identical to plain vLLM for every kind of tree.

CI runs a part; `MEDUSA_LONG=1` (make test-long) runs 16 prompts of 128 tokens at batch 1, 4 and 16 for every tree.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from engines import Engine, random_tree, start

from vllm_medusa.defaults import bundled_heads, default_model
from vllm_medusa.heads.checkpoint import read_config
from vllm_medusa.tree.growth import grow_static
from vllm_medusa.tree.topology import Tree

pytestmark = pytest.mark.slow
LONG = bool(os.environ.get("MEDUSA_LONG"))
TOKENS = 128 if LONG else 40
BATCHES = [1, 4, 16] if LONG else [4, 16]
OPTIONS = {"max_model_len": 512, "block_size": 32, "skip_tokenizer_init": False}
QUESTIONS = [
    "Hi!",
    "What is the capital of France?",
    "Write a haiku about rain.",
    "List five fruits and a colour for each of them.",
    "def fibonacci(n):",
    "Explain to a child why the sky is blue, in three sentences.",
    "If a train goes 60 km in 40 minutes, how far does it go in two hours? Show each step.",
    "Translate to German: The cat sleeps on the warm stone.",
    "Write a Python function that reverses a linked list, with comments.",
    "Name the planets of the solar system in order of their distance from the sun.",
    "Tell a short story about a lighthouse keeper who finds a letter in a bottle, in a calm tone.",
    "What are the differences between a list and a tuple in Python? Give one example for each.",
    "Count from one to thirty in words.",
    "Write an e-mail to a colleague to move a meeting from Tuesday to Thursday, polite and brief, with a reason.",
    "A shop sells pens at 3 for 2 euros. How much do 12 pens cost, and how many pens can I buy for 10 euros?",
    "Summarise in two sentences: the water cycle moves water from sea to air to land and back again.",
]


@pytest.fixture(scope="module")
def model() -> str:
    return default_model()


@pytest.fixture(scope="module")
def prompts(model: str) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


@pytest.fixture(scope="module")
def greedy():
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=TOKENS)


@pytest.fixture(scope="module")
def plain(model: str) -> Engine:
    return start(model, **OPTIONS)


@pytest.fixture(scope="module")
def medusa(model: str) -> Engine:
    return start(model, bundled_heads(), **OPTIONS, medusa={"num_speculative_tokens": 64, "adaptive": False})


@pytest.fixture(scope="module")
def truth(plain: Engine, prompts, greedy) -> list[list[int]]:
    return plain.tokens(prompts, greedy)


def trees() -> dict[str, Tree | tuple[str, int]]:
    """Every tree that is tried: by name, a fixed one or ("dynamic", nodes)."""
    config = read_config(Path(bundled_heads()))
    accuracy = config.calibration.rank_accuracy
    rng = np.random.default_rng(1)
    found: dict[str, Tree | tuple[str, int]] = {"chain": Tree.chain(config.num_heads), "dynamic 16": ("dynamic", 16)}
    found["static 63"] = grow_static(accuracy, 63)
    found["random 0"] = _ranked(random_tree(rng, 26, config.num_heads))
    if LONG:
        found |= {f"static {n}": grow_static(accuracy, n) for n in (1, 5, 8, 26, 64)}
        found |= {f"dynamic {n}": ("dynamic", n) for n in (1, 8, 63)}
        found |= {
            f"random {i}": _ranked(random_tree(rng, int(rng.integers(2, 32)), config.num_heads)) for i in range(1, 10)
        }
    return found


def _ranked(tree: Tree) -> Tree:
    """The same tree without nodes whose rank no head offers, so that every node has a token."""
    kept: dict[int, int] = {0: 0}
    parents, ranks = [], []
    for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True)):
        if parent in kept and rank < 10:
            parents.append(kept[parent])
            ranks.append(rank)
            kept[node + 1] = len(parents)
    return Tree(tuple(parents), tuple(ranks))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", list(trees()) if (Path(bundled_heads()) / "config.json").exists() else [])
def test_greedy_is_token_identical(medusa, prompts, truth, greedy, name, batch):
    tree = trees()[name]
    medusa.draft_with(tree) if isinstance(tree, Tree) else medusa.draft_with("dynamic", tree[1])
    medusa.runner.medusa_report(reset=True)
    count = len(prompts) if LONG or batch == 16 else 8
    found = [tokens for i in range(0, count, batch) for tokens in medusa.tokens(prompts[i : i + batch], greedy)]
    assert found == truth[:count]
    assert medusa.runner.medusa_report()["mean_accepted_length"] > 1.15, "trained heads must be right now and then"


def test_seeded_sampling_is_token_identical(plain, medusa, prompts):
    from vllm import SamplingParams

    medusa.draft_with("dynamic", 16)
    params = [
        SamplingParams(
            temperature=0.7 + 0.05 * i, top_p=0.95, seed=i, max_tokens=TOKENS, logprobs=2 if i % 3 == 0 else None
        )
        for i in range(len(prompts))
    ]
    assert medusa.tokens(prompts, params) == plain.tokens(prompts, params)


def test_stop_strings_cut_as_in_plain_decoding(plain, medusa, prompts, truth, model):
    from transformers import AutoTokenizer
    from vllm import SamplingParams

    medusa.draft_with("dynamic", 16)
    text = AutoTokenizer.from_pretrained(model).decode(truth[8])
    for start_at in range(20, 60, 4):
        params = SamplingParams(
            temperature=0,
            max_tokens=TOKENS,
            stop=[text[start_at : start_at + 5]],
            include_stop_str_in_output=start_at % 8 == 0,
        )
        ours, theirs = medusa.answer([prompts[8]], params)[0], plain.answer([prompts[8]], params)[0]
        assert (ours.text, ours.token_ids, ours.finish_reason) == (theirs.text, theirs.token_ids, theirs.finish_reason)


@pytest.mark.parametrize("kind", ["regex", "json", "choice"])
def test_a_grammar_gets_the_same_answer(plain, medusa, prompts, kind):
    """Real trees under a grammar, beside requests without one."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
    grammar = {
        "regex": {"regex": r"(red|green|blue)( and (red|green|blue)){3}"},
        "json": {"json": schema},
        "choice": {"choice": ["certainly not", "certainly", "perhaps"]},
    }[kind]
    medusa.draft_with("dynamic", 16)
    params = [
        SamplingParams(
            temperature=0, max_tokens=TOKENS, structured_outputs=StructuredOutputsParams(**grammar) if i % 2 else None
        )
        for i in range(6)
    ]
    assert medusa.tokens(prompts[:6], params) == plain.tokens(prompts[:6], params)


def test_junk_answers_are_possible(truth):
    assert all(truth), "an empty answer would prove nothing"
