"""Trees give the tokens of plain decoding, whatever the trees, the batch and the schedule (tiny Llama, float32)."""

from __future__ import annotations

import numpy as np
import pytest
from engines import MAX_LEN, Engine, Oracle, random_prompts, random_tree, start

from vllm_medusa.tree.topology import Tree

pytestmark = pytest.mark.slow  # an engine starts

SIZES = [1, 5, 8, 26, 31, 32, 33, 63, 64, 65, 127, 128]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Sixteen prompts of different lengths."""
    return random_prompts(np.random.default_rng(3), [3, 5, 8, 13, 21, 30, 31, 32, 33, 34, 55, 63, 64, 65, 89, 120])


@pytest.fixture(scope="module")
def greedy():
    """Greedy, to the last token."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def truth(tiny: Engine, prompts, greedy) -> list[list[int]]:
    """What plain vLLM says."""
    return tiny.tokens(prompts, greedy)


def oracle_for(engine: Engine, prompts, truth, shape, seed=0) -> Oracle:
    """An oracle over the plain engine's answers."""
    return Oracle(
        engine, {tuple(p): t for p, t in zip(prompts, truth, strict=True)}, shape, np.random.default_rng(seed)
    )


@pytest.mark.parametrize("nodes", SIZES)
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_random_trees_of_each_size(tiny_medusa, drafting, prompts, truth, greedy, nodes, batch):
    oracle = drafting(oracle_for(tiny_medusa, prompts, truth, lambda rng: random_tree(rng, nodes), seed=nodes))
    tiny_medusa.runner.medusa_report(reset=True)
    for first in range(0, 16 if batch > 1 else 4, batch):
        part = slice(first, first + batch)
        assert tiny_medusa.tokens(prompts[part], greedy) == truth[part]
    report = tiny_medusa.runner.medusa_report()
    assert report["mean_accepted_length"] > 1.3, "the oracle's paths were not accepted"
    assert len(tiny_medusa.runner.book) <= batch
    assert oracle.misses > 0


def test_every_request_has_its_own_topology(tiny_medusa, drafting, prompts, truth, greedy):
    drafting(oracle_for(tiny_medusa, prompts, truth, lambda rng: random_tree(rng, int(rng.integers(0, 40)))))
    assert tiny_medusa.tokens(prompts, greedy) == truth


def test_a_chain_accepts_to_its_end(tiny_medusa, drafting, prompts, truth, greedy):
    oracle = oracle_for(tiny_medusa, prompts, truth, lambda rng: Tree.chain(5))
    oracle.misses = 0.0
    oracle.plant = lambda tree, true: [*true[:5], *[2] * max(0, 5 - len(true))]
    drafting(oracle)
    tiny_medusa.runner.medusa_report(reset=True)
    assert tiny_medusa.tokens(prompts, greedy) == truth
    assert tiny_medusa.runner.medusa_report()["mean_accepted_length"] > 5.0


def test_junk_heads_change_nothing(tiny_medusa, prompts, truth, greedy):
    tiny_medusa.draft_with("dynamic", 26)
    assert tiny_medusa.tokens(prompts, greedy) == truth


def test_junk_siblings_do_not_change_what_a_chain_accepts(tiny_medusa, tiny, drafting, prompts):
    """Step by step over 200 tokens: a chain, and the same chain among junk siblings, accept the same."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    prompt = prompts[4]
    answer = tiny.tokens([prompt], params)[0]
    accepted = {}
    for name, tree, rows in (
        ("chain", Tree.chain(4), (1, 2, 3, 4)),
        ("bush", Tree((0, 0, 0, 1, 1, 4, 4, 6, 6, 6)), (1, 4, 6, 8)),
    ):
        oracle = drafting(oracle_for(tiny_medusa, [prompt], [answer], lambda rng, tree=tree: tree))
        oracle.plant = Planter(tiny_medusa, rows)
        assert tiny_medusa.tokens([prompt], params) == [answer]
        accepted[name] = oracle.plant.accepted
    assert accepted["chain"] == accepted["bush"]
    assert set(accepted["chain"]) == {0, 1, 2, 3, 4} and len(accepted["chain"]) > 50


class Planter:
    """Plants truth on `rows`, wrong from a depth that the step decides; the rest is junk. Notes what is accepted."""

    def __init__(self, engine: Engine, rows: tuple[int, ...]) -> None:
        self.engine, self.rows, self.accepted = engine, rows, []

    def __call__(self, tree: Tree, truth: list[int]) -> list[int]:
        self.accepted.append(int(self.engine.runner.tree_sampler.walk.lengths[0]) - 1)
        right = len(self.accepted) % (len(self.rows) + 1)
        junk = next(token for token in range(2, 150) if token not in truth[:6])
        tokens = [junk] * tree.num_nodes
        for depth, row in enumerate(self.rows[: min(right, len(truth))]):
            tokens[row - 1] = truth[depth]
        return tokens


@pytest.mark.parametrize("block_size", [32, 128])
def test_every_prompt_length_around_blocks(tiny_model, tiny_heads, tiny, drafting, block_size):
    """Prompts of every length from 1 to two blocks and one, so that paths cross block borders at each alignment."""
    from vllm import SamplingParams

    engine = start(
        tiny_model,
        tiny_heads,
        max_model_len=MAX_LEN,
        block_size=block_size,
        medusa={"num_speculative_tokens": 26, "adaptive": False},
    )
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = random_prompts(np.random.default_rng(5), list(range(1, 2 * block_size + 2)))
    truth = tiny.tokens(prompts, params)
    drafting(oracle_for(engine, prompts, truth, lambda rng: random_tree(rng, 26)))
    free = engine.free_blocks
    assert engine.tokens(prompts, params) == truth
    assert engine.free_blocks == free


@pytest.mark.parametrize("budget", [40, 64])
def test_chunked_prefill_and_mixed_batches(tiny_model, tiny_heads, tiny, drafting, prompts, truth, greedy, budget):
    """Prompts are computed in pieces while other requests check trees, cut where the token budget ends."""
    engine = start(
        tiny_model,
        tiny_heads,
        max_model_len=MAX_LEN,
        block_size=32,
        max_num_batched_tokens=budget,
        max_num_seqs=5,
        medusa={"num_speculative_tokens": 16, "adaptive": False},
    )
    drafting(oracle_for(engine, prompts, truth, lambda rng: random_tree(rng, 16)))
    assert engine.tokens(prompts, greedy) == truth


def test_prefix_caching_reads_committed_blocks(tiny_model, tiny_heads, tiny, drafting):
    """A second request continues the first one's answer from the cache: right only if the commit was."""
    from vllm import SamplingParams

    engine = start(
        tiny_model,
        tiny_heads,
        max_model_len=MAX_LEN,
        block_size=32,
        enable_prefix_caching=True,
        medusa={"num_speculative_tokens": 26, "adaptive": False},
    )
    first = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    second = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = random_prompts(np.random.default_rng(8), [5, 17, 33, 64])
    answers = tiny.tokens(prompts, first)
    longer = [p + a for p, a in zip(prompts, answers, strict=True)]
    rest = tiny.tokens(longer, second)
    drafting(oracle_for(engine, prompts + longer, answers + rest, lambda rng: random_tree(rng, 26)))
    assert engine.tokens(prompts, first) == answers
    outputs = engine.llm.generate([{"prompt_token_ids": p} for p in longer], second, use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in outputs] == rest
    assert all(o.num_cached_tokens >= 96 for o in outputs), "the second round must read the cache"


def test_preemption_and_the_length_limit(tiny_model, tiny_heads, tiny, drafting):
    """A cache too small for the batch, and answers that end at max_model_len inside a tree."""
    from vllm import SamplingParams

    limit = 96
    engine = start(
        tiny_model,
        tiny_heads,
        max_model_len=limit,
        block_size=32,
        num_gpu_blocks_override=10,
        medusa={"num_speculative_tokens": 12, "adaptive": False},
    )
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    prompts = random_prompts(np.random.default_rng(9), [1, 7, 20, 31, 33, 60, 80, 95])
    truth = [t[: limit - len(p)] for p, t in zip(prompts, tiny.tokens(prompts, params), strict=True)]
    drafting(oracle_for(engine, prompts, truth, lambda rng: random_tree(rng, 12)))
    free = engine.free_blocks
    assert engine.tokens(prompts, params) == truth
    assert engine.free_blocks == free
