"""Grammars with real trees: masks by path, forbidden nodes pruned, the same valid answers as plain decoding."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import numpy as np
import pytest
import torch
from engines import SPEAKING, Engine, Oracle, random_tree, start

from vllm_medusa.tree.topology import Tree

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
REGEX = r"(red|green|blue)( and (red|green|blue)){3}"
CHOICES = ["certainly not", "certainly", "perhaps"]
EBNF = 'root ::= ("left" | "right") " " number\nnumber ::= [1-9] [0-9]? | "none"\n'
GRAMMARS: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "regex": {"regex": REGEX},
    "choice": {"choice": CHOICES},
    "grammar": {"grammar": EBNF},
}
QUESTIONS = ["Who is there?", "Name a colour.", "Shall we?", "Which way, and how far?", "Tell me more of it.", "Yes"]


def is_valid(kind: str, text: str) -> bool:
    if kind == "json":
        value = json.loads(text, strict=False)  # a grammar may allow control characters in a string
        return set(value) == {"name", "age"} and isinstance(value["name"], str) and isinstance(value["age"], int)
    if kind == "regex":
        return re.fullmatch(REGEX, text) is not None
    if kind == "choice":
        return text in CHOICES
    return re.fullmatch(r"(left|right) ([1-9][0-9]?|none)", text) is not None


def params_for(kind: str | None, **more: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    grammar = StructuredOutputsParams(**GRAMMARS[kind]) if kind is not None else None
    return SamplingParams(**{"temperature": 0, "max_tokens": 60, "structured_outputs": grammar, **more})


def prompt_ids(engine: Engine, count: int = len(QUESTIONS)) -> list[list[int]]:
    """Prompts that differ, so that an oracle knows each answer by its prompt."""
    tokenizer = engine.llm.get_tokenizer()
    return [tokenizer(f"{i}. {QUESTIONS[i % len(QUESTIONS)]}")["input_ids"] for i in range(count)]


def drafted(engine: Engine, prompts, truth, nodes: int = 20, seed: int = 0) -> Oracle:
    answers = {tuple(p): list(c.token_ids) + [0] * 8 for p, c in zip(prompts, truth, strict=True)}
    vocab = engine.runner.model_config.get_vocab_size()
    return Oracle(engine, answers, lambda rng: random_tree(rng, nodes), np.random.default_rng(seed), vocab=vocab)


def matcher(engine: Engine, backend: str, kind: str) -> tuple[Any, Any]:
    """A grammar backend of the host's and one matcher of it."""
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    kinds = {"xgrammar": XgrammarBackend, "guidance": GuidanceBackend}
    tokenizer = engine.llm.get_tokenizer()
    made = kinds[backend](engine.llm.llm_engine.vllm_config, tokenizer=tokenizer, vocab_size=len(tokenizer))
    option = StructuredOutputOptions.JSON if kind == "json" else StructuredOutputOptions.REGEX
    return made, made.compile_grammar(option, json.dumps(SCHEMA) if kind == "json" else REGEX)


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
@pytest.mark.parametrize("kind", ["json", "regex"])
def test_masks_are_those_of_each_nodes_own_path(speaker_medusa, backend, kind):
    """Random trees against a fresh walk of the matcher for every node; the matcher's state is the same afterwards."""
    from vllm_medusa.host.grammar import GrammarTree, fill_masks, prune

    made, grammar = matcher(speaker_medusa, backend, kind)
    tokenizer = speaker_medusa.llm.get_tokenizer()
    text = '{"name": "Bo", "age": 7}' if kind == "json" else "red and blue and green and red"
    said = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    rng = np.random.default_rng(3)
    mask = made.allocate_token_bitmask(33)
    checked = 0
    for place in range(len(said)):
        tree = random_tree(rng, 24)
        tokens = rng.integers(0, len(tokenizer), 24).tolist()
        leaf = max(range(25), key=lambda row: tree.depths[row])
        for row, token in zip(tree.path(leaf), said[place:], strict=False):
            tokens[row - 1] = token
        before = made.allocate_token_bitmask(1)
        grammar.fill_bitmask(before, 0)
        pruned = prune(grammar, "r", tokens, tree.parents)
        whole = GrammarTree(tokens, np.array(tree.parents), np.arange(24))
        fill_masks(grammar, "r", whole, 24, mask)
        after = made.allocate_token_bitmask(1)
        grammar.fill_bitmask(after, 0)
        assert torch.equal(before, after), "the matcher must stand where it stood"
        assert pruned.tokens == [tokens[node] for node in pruned.kept]
        for row in range(25):
            path = [tokens[r - 1] for r in tree.path(row)] if row else []
            if tokenizer.eos_token_id in path:  # the request ends here: nobody asks what follows
                continue
            allowed = grammar.validate_tokens(path) == path
            assert allowed == (row == 0 or row - 1 in pruned.kept)
            expected = torch.full((1, mask.shape[1]), -1, dtype=torch.int32)
            if allowed:
                assert not path or grammar.accept_tokens("r", path)
                if not grammar.is_terminated():
                    grammar.fill_bitmask(expected, 0)
                if path:
                    grammar.rollback(len(path))
            assert torch.equal(mask[row], expected[0])
            checked += allowed
        assert grammar.accept_tokens("r", [said[place]])
    assert checked > len(said) + 5, "paths must be followed, not roots alone"


def test_same_valid_answers_beside_free_requests(speaker, speaker_medusa, drafting, caplog):
    compare_thirty(speaker, speaker_medusa, drafting, caplog)


def test_same_valid_answers_with_guidance(speaker_model, speaker_heads, drafting, caplog):
    options = {**SPEAKING, "structured_outputs_config": {"backend": "guidance"}}
    medusa = {"num_speculative_tokens": 32, "adaptive": False}
    plain = start(speaker_model, **options)
    trees = start(speaker_model, speaker_heads, **options, medusa=medusa)
    compare_thirty(plain, trees, drafting, caplog)


def compare_thirty(plain: Engine, trees: Engine, drafting, caplog) -> None:
    """Thirty requests together: four kinds of grammar and none, greedy and seeded, with paths planted in junk trees."""
    prompts = prompt_ids(plain, 30)
    kinds = [*GRAMMARS, None]
    chosen = [kinds[i % len(kinds)] for i in range(len(prompts))]
    params = [params_for(kind, temperature=0.9 if i % 3 == 0 else 0, seed=i) for i, kind in enumerate(chosen)]
    truth = plain.answer(prompts, params)
    drafting(drafted(trees, prompts, truth))
    trees.runner.medusa_report(reset=True)
    with caplog.at_level(logging.ERROR):
        found = trees.answer(prompts, params)
    for kind, ours, theirs in zip(chosen, found, truth, strict=True):
        assert (ours.token_ids, ours.text, ours.finish_reason) == (theirs.token_ids, theirs.text, theirs.finish_reason)
        if kind is not None and ours.finish_reason == "stop":
            assert is_valid(kind, ours.text), (kind, ours.text)
    assert trees.runner.medusa_report()["mean_accepted_length"] > 1.1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_the_second_branch_is_accepted_and_the_forbidden_one_costs_nothing(speaker, speaker_medusa, drafting):
    """Root children: a forbidden token, an allowed one that is not said, the said one; only two are computed."""
    prompts = prompt_ids(speaker)[:1]
    params = params_for("choice")
    truth = speaker.answer(prompts, params)[0]
    said = list(truth.token_ids)
    tokenizer = speaker.llm.get_tokenizer()
    starts = {tokenizer(text, add_special_tokens=False)["input_ids"][0] for text in CHOICES}
    other = next(iter(starts - set(said)))
    oracle = Oracle(speaker_medusa, {}, lambda rng: Tree((0, 0, 0, 3, 3, 5)))

    def draft(rows, hidden, roots):
        state = speaker_medusa.runner.requests[speaker_medusa.runner.input_batch.req_ids[rows[0]]]
        rest = said[len(state.output_token_ids) :] + [2] * 4
        oracle.plant = lambda tree, _truth: [9, other, rest[0], 9, rest[1], rest[2]]
        oracle.answers[tuple(prompts[0])] = said
        return Oracle.__call__(oracle, rows, hidden, roots)

    drafting(oracle)
    speaker_medusa.runner._draft = draft
    speaker_medusa.runner.medusa_report(reset=True)
    found = speaker_medusa.answer(prompts, params)[0]
    report = speaker_medusa.runner.medusa_report()
    assert list(found.token_ids) == said
    assert report["steps"] < len(said) - 1, "several tokens of the second branch must come in one step"
    assert all(9 not in example["tokens"] for example in report["examples"])


def test_thinking_first_then_the_grammar(speaker_model, speaker_heads, drafting):
    """A reasoning model: free until it ends its thought, then bound; while it thinks, drafts are one sequence."""
    options = {**SPEAKING, "structured_outputs_config": {"reasoning_parser": "deepseek_r1"}}
    plain = start(speaker_model, **options)
    trees = start(speaker_model, speaker_heads, **options, medusa={"num_speculative_tokens": 32, "adaptive": False})
    end = plain.llm.get_tokenizer().convert_tokens_to_ids("</think>")
    prompts = prompt_ids(plain)
    params = [params_for(kind, temperature=1.0, seed=4, logit_bias={end: 9.0}) for kind in [*GRAMMARS, None, "regex"]]
    truth = plain.answer(prompts, params)
    drafting(drafted(trees, prompts, truth))
    trees.runner.medusa_report(reset=True)
    found = trees.answer(prompts, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in truth]
    assert sum(end in list(c.token_ids)[1:-2] for c in truth) >= 2, "some must think first, and then speak"
    assert trees.runner.medusa_report()["mean_accepted_length"] > 1.1


def test_a_thinking_budget_is_kept(speaker_model, speaker_heads, drafting):
    """The host counts drafts as thoughts, so such a request gets none; the others keep their trees."""
    reasoning = {"reasoning_parser": "deepseek_r1", "reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
    options = {**SPEAKING, "reasoning_config": reasoning}
    plain = start(speaker_model, **options)
    trees = start(speaker_model, speaker_heads, **options, medusa={"num_speculative_tokens": 32, "adaptive": False})
    begin, end = plain.llm.get_tokenizer().convert_tokens_to_ids(["<think>", "</think>"])
    prompts = [[*prompt, begin] for prompt in prompt_ids(plain)]
    params = [
        params_for(None, max_tokens=30, ignore_eos=True, thinking_token_budget=3 + i if i % 2 else None)
        for i in range(6)
    ]
    truth = plain.answer(prompts, params)
    drafting(drafted(trees, prompts, truth))
    trees.runner.medusa_report(reset=True)
    found = trees.answer(prompts, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in truth]
    for i in (1, 3, 5):
        assert end in list(truth[i].token_ids)[: 3 + i + 1], "the budget must end the thought"
    assert trees.runner.medusa_report()["mean_accepted_length"] > 1.3


@pytest.mark.parametrize("fixed", [False, True], ids=["0.32", "0.33"])
def test_both_layouts_of_mask_rows(speaker_medusa, monkeypatch, fixed):
    """As many rows as nodes, or always 1 + num_speculative_tokens; rows beyond the tree allow everything."""
    from vllm_medusa.host import scheduler as ours
    from vllm_medusa.host.grammar import prune

    monkeypatch.setattr(ours, "grammar_rows_have_fixed_stride", lambda: fixed)
    made, grammar = matcher(speaker_medusa, "xgrammar", "regex")
    tokenizer = speaker_medusa.llm.get_tokenizer()
    said = tokenizer("red and blue", add_special_tokens=False)["input_ids"]
    tree = prune(grammar, "r", said[:3], [0, 1, 2])
    core = speaker_medusa.llm.llm_engine.engine_core.engine_core.scheduler
    monkeypatch.setattr(core.structured_output_manager, "backend", made)
    monkeypatch.setattr(core, "_tree_mask", None)

    class Request:
        request_id = "r"

        class structured_output_request:
            pass

    Request.structured_output_request.grammar = grammar
    rows = core._tree_rows(Request, tree, 3)
    assert rows.shape[0] == (33 if fixed else 4)
    assert (rows[:4] != -1).any(axis=1).all() and (rows[4:] == -1).all()


def test_room_for_masks_grows_with_what_steps_need(speaker_medusa, drafting):
    """Not with the largest tree of every request that may ever run at once: 16 of 33 rows."""
    manager = speaker_medusa.llm.llm_engine.engine_core.engine_core.scheduler.structured_output_manager
    manager._grammar_bitmask = None
    prompts = prompt_ids(speaker_medusa)
    truth = speaker_medusa.answer(prompts, params_for("regex"))
    drafting(drafted(speaker_medusa, prompts, truth))
    found = speaker_medusa.answer(prompts, [params_for("regex"), *[params_for(None)] * 3, *[params_for("regex")] * 2])
    assert all(is_valid("regex", found[row].text) for row in (0, 4, 5))
    rows = len(manager._grammar_bitmask)
    assert 0 < rows <= 2 * len(prompts) < 16 * 33
