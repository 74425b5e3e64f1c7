"""A session that goes on after a turn that ended inside an accepted path says what plain vLLM's says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engines import MAX_LEN, VOCAB, Engine, Oracle, random_prompts, start
from sessions import Session, talk

from vllm_medusa.tree.topology import Tree

pytestmark = pytest.mark.slow
FIRST, SECOND = range(2, 9), range(1, 9)
# Junk beside the path, which lies in slots 2, 5, 7, ... and is eight deep: it has to be moved, and ends turns inside.
TREE = Tree((0, 0, 1, 1, 2, 5, 5, 7, 7, 9, 10, 11, 12))


def fan(rng: np.random.Generator) -> Tree:
    """The tree, whatever the draw."""
    return TREE


class Deepest(Oracle):
    """Plants the continuation on the deepest path, each time."""

    def plant(self, tree: Tree, truth: Any) -> list[int]:
        tokens = [int(token) for token in self.rng.integers(2, self.vocab - 1, tree.num_nodes)]
        deepest = max(range(tree.num_rows), key=lambda row: (tree.depths[row], row))
        for row, token in zip(tree.path(deepest), truth, strict=False):
            tokens[row - 1] = token
        return tokens


def answers_to(plain: Engine, sessions: list[Session]) -> dict[Any, list[int]]:
    """What plain vLLM would go on to say in each turn, further than the turn goes."""
    from vllm import SamplingParams

    asked = [(session.text(turn), session.turns[turn][1]) for session in sessions for turn in range(len(session.turns))]
    longer = [
        SamplingParams(**{"temperature": 0, "ignore_eos": True, **params, "max_tokens": 24}) for _, params in asked
    ]
    said = plain.tokens([text for text, _ in asked], longer)
    return {tuple(text): tokens for (text, _), tokens in zip(asked, said, strict=True)}


def sessions_of(first: int, more: dict[str, Any], seed: int, third: int = 0) -> list[Session]:
    """One session for each length of the second turn."""
    rng = np.random.default_rng([seed, first])
    prompts = random_prompts(rng, [int(length) for length in rng.integers(1, 40, 3 * len(SECOND))])
    turns = [
        [(prompts.pop(), {"max_tokens": length, **more}) for length in (first, second, third) if length]
        for second in SECOND
    ]
    return [Session(turn) for turn in turns]


def check(plain: Engine, trees: Engine, drafting: Any, sessions: list[Session], *, at_once: bool) -> None:
    told = talk(plain, sessions, at_once=at_once)
    oracle = drafting(Deepest(trees, answers_to(plain, sessions), fan, vocab=VOCAB))
    oracle.rng = np.random.default_rng(5)
    free = trees.free_blocks
    assert talk(trees, sessions, at_once=at_once) == told
    assert trees.free_blocks == free


@pytest.mark.parametrize("at_once", [False, True], ids=["one turn after the other", "all turns at once"])
@pytest.mark.parametrize("first", FIRST)
def test_a_second_turn(tiny, tiny_medusa, drafting, first, at_once):
    tiny_medusa.runner.medusa_report(reset=True)
    check(tiny, tiny_medusa, drafting, sessions_of(first, {}, 1), at_once=at_once)
    assert tiny_medusa.runner.medusa_report()["mean_accepted_length"] > 1.2


@pytest.mark.parametrize(
    "more", [{"temperature": 0.9, "seed": 3}, {"temperature": 0.7, "seed": 4, "repetition_penalty": 1.2}], ids=str
)
def test_a_seed_goes_on_where_the_turn_ended(tiny, tiny_medusa, drafting, more):
    """A walk takes no draws behind the end of a turn."""
    for first in FIRST:
        sessions = sessions_of(first, more, 2, third=5)
        told = talk(tiny, sessions)
        known = {
            tuple(session.text(turn)): [*answer, *[5] * 9]
            for session in sessions
            for turn, answer in enumerate(session.said)
        }
        known |= {key: longer_than(tiny, key, answer, more) for key, answer in known.items()}
        drafting(Deepest(tiny_medusa, known, fan, vocab=VOCAB))
        assert talk(tiny_medusa, sessions) == told


def longer_than(plain: Engine, text: tuple[int, ...], answer: list[int], more: dict[str, Any]) -> list[int]:
    """The answer, then whatever: what is drafted behind the end of a turn may be right or wrong."""
    from vllm import SamplingParams

    asked = SamplingParams(max_tokens=24, ignore_eos=True, **more)
    return [*answer[:-9], *plain.tokens([list(text)], asked)[0][len(answer) - 9 :]]


def test_turns_that_end_by_a_stop_token(tiny, tiny_medusa, drafting):
    """The worker cannot know from `max_tokens` that nothing should be drafted for what comes next."""
    for first in FIRST:
        sessions = sessions_of(first, {}, 3, third=6)
        told = talk(tiny, sessions)
        for session, answers in zip(sessions, told, strict=True):
            session.turns = [
                (prompt, {"max_tokens": 20, "stop_token_ids": [answer[-1]]})
                for (prompt, _), answer in zip(session.turns, answers, strict=True)
            ]
        check(tiny, tiny_medusa, drafting, sessions, at_once=False)


def test_prompts_in_pieces_and_the_prefix_cache(tiny_model, tiny_heads, drafting):
    """Turns are read in pieces of 16 tokens; whoever says the same afterwards finds it in the cache."""
    from vllm import SamplingParams

    options = {"max_model_len": MAX_LEN, "block_size": 32, "enable_prefix_caching": True, "max_num_batched_tokens": 40}
    plain = start(tiny_model, **options, max_num_seqs=8)
    medusa = {"num_speculative_tokens": TREE.num_nodes, "adaptive": False}
    trees = start(tiny_model, tiny_heads, **options, medusa=medusa, max_num_seqs=8)
    for first in (3, 6):
        sessions = sessions_of(first, {}, 4, third=40)
        check(plain, trees, drafting, sessions, at_once=False)
        texts = [[*session.text(2), *session.said[2]] for session in sessions]
        asked = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        truth = plain.tokens(texts, asked)
        drafting(
            Deepest(trees, {tuple(t): [*a, *[5] * 9] for t, a in zip(texts, truth, strict=True)}, fan, vocab=VOCAB)
        )
        assert trees.tokens(texts, asked) == truth
