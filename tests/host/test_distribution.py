"""What is emitted has the target's distribution: chi-square over 100,000 sequences of three tokens for each case.

Sequences come from real steps of the walk over random trees in an eight-token vocabulary, whose next-token logits
depend on the last token alone, so that every probability is known. Three deliberately wrong samplers must be caught.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engines import random_tree
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors, MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from vllm_medusa.host.trees import RequestDraft, StepTrees
from vllm_medusa.host.v1.sampling import StepRows, TreeSampler
from vllm_medusa.proposer import DrawnTokens, TreeDraft
from vllm_medusa.tree.rejection import draw_children
from vllm_medusa.tree.topology import Tree

pytestmark = pytest.mark.slow
VOCAB, LENGTH, BATCH, ROUNDS = 8, 3, 5000, 20
LOGITS = torch.from_numpy(np.random.default_rng(5).normal(0, 1.5, (VOCAB, VOCAB))).float()  # [last token, next token]
HEADS = torch.from_numpy(np.random.default_rng(6).normal(0, 1.5, (4, VOCAB))).float()  # proposals by depth
CASES = [
    {"temperature": t, **more}
    for t in (0.3, 1.0, 2.0)
    for more in ({}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.15}, {"top_k": 6, "top_p": 0.9})
]


def expected(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """float64 [last token, next token], from the definitions."""
    p = torch.softmax(LOGITS.double() / temperature, 1).numpy()
    p = np.where(p < min_p * p.max(1, keepdims=True), 0, p)
    for row in p:
        order = np.argsort(-row)
        if top_k:
            row[order[top_k:]] = 0
        row /= row.sum()
        before = np.cumsum(row[order]) - row[order]
        row[order[before >= top_p]] = 0
        row /= row.sum()
    return p


@dataclass
class Asked:
    """A batch of `count` requests with the same parameters."""

    count: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def metadata(self) -> SamplingMetadata:
        n, floats = self.count, torch.zeros(self.count)
        processors = LogitsProcessors()
        if self.min_p:
            config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=n))
            processor = MinPLogitsProcessor(config, torch.device("cpu"), False)
            asked = SamplingParams(min_p=self.min_p)
            added = [(row, asked, [], []) for row in range(n)]
            processor.update_state(BatchUpdate(n, removed=[], added=added, moved=[]))
            processors = LogitsProcessors([processor])
        return SamplingMetadata(
            temperature=torch.full((n,), self.temperature),
            all_greedy=False,
            all_random=True,
            top_p=torch.full((n,), self.top_p) if self.top_p < 1 else None,
            top_k=torch.full((n,), self.top_k, dtype=torch.int32) if self.top_k else None,
            generators={},
            max_num_logprobs=None,
            no_penalties=True,
            prompt_token_ids=None,
            frequency_penalties=floats,
            presence_penalties=floats,
            repetition_penalties=floats,
            output_token_ids=[],
            allowed_token_ids_mask=None,
            bad_words_token_ids={},
            logitsprocs=processors,
        )


def likeliest_drafts(rng: np.random.Generator, count: int) -> TreeDraft:
    """A random tree of ten nodes for each of fifty requests, repeated: siblings differ, cousins do not."""
    tokens, parents = [], []
    for _ in range(50):
        tree = random_tree(rng, 10, max_depth=3)
        names = np.zeros(10, dtype=np.int64)
        for row in range(11):
            below = [child - 1 for child in tree.children(row)][:VOCAB]
            names[below] = rng.permutation(VOCAB)[: len(below)]
        tokens.append(names)
        parents.append(tree.parents)
    times = -(-count // 50)
    table = [np.tile(np.array(values), (times, 1))[:count] for values in (tokens, parents)]
    shape = table[0].shape
    return TreeDraft(*table, np.zeros(shape, dtype=np.int64), np.ones(shape, dtype=np.float32), np.full(count, 10))


SHAPE = Tree((0, 0, 0, 1, 1, 2, 4, 4))


def drawn_drafts(rng: np.random.Generator, count: int) -> TreeDraft:
    """Candidates drawn without replacement from the heads' distributions."""
    del rng
    scores = HEADS.log_softmax(1)
    tokens = np.zeros((count, SHAPE.num_nodes), dtype=np.int64)
    for row in range(SHAPE.num_rows):
        children = [child - 1 for child in SHAPE.children(row)]
        if children:
            own = scores[SHAPE.depths[row]].expand(count, VOCAB)
            tokens[:, children] = draw_children(own, len(children), torch.rand(count, VOCAB)).numpy()
    drawn = DrawnTokens(np.ones(count, dtype=bool), scores.exp().expand(count, 4, VOCAB), None)
    parents = np.tile(np.array(SHAPE.parents), (count, 1))
    return TreeDraft(
        tokens, parents, np.zeros_like(parents), np.ones(parents.shape, dtype=np.float32),
        np.full(count, SHAPE.num_nodes), drawn,
    )  # fmt: skip


def laid(draft: TreeDraft) -> StepTrees:
    count = len(draft.sizes)
    ends = np.cumsum(draft.sizes + 1)
    return StepTrees(
        requests=[str(row) for row in range(count)],
        tokens=draft.tokens,
        parents=draft.parents,
        ranks=draft.ranks,
        reach=draft.reach,
        sizes=draft.sizes,
        first_token=ends - (draft.sizes + 1),
        first_logit=ends - (draft.sizes + 1),
        context=np.ones(count, dtype=np.int64),
        drafts=[RequestDraft(draft, row, int(size)) for row, size in enumerate(draft.sizes)],
        pure_decode=True,
    )


def sequences(sampler: TreeSampler, asked: Asked, drafts: Callable[..., TreeDraft], seed: int) -> np.ndarray:
    """int64 [count, 3], emitted from token 0 on by as many steps as it takes."""
    rng = np.random.default_rng(seed)
    out = np.full((asked.count, LENGTH), -1)
    done = np.zeros(asked.count, dtype=np.int64)
    last = np.zeros(asked.count, dtype=np.int64)
    while (open_rows := np.flatnonzero(done < LENGTH)).size:
        part = replace(asked, count=open_rows.size)
        trees = laid(drafts(rng, part.count))
        row_tokens = np.concatenate([last[open_rows][:, None], trees.tokens], axis=1)
        logits = LOGITS[torch.from_numpy(row_tokens[trees.on_row])].clone()
        histories: list[list[int]] = [[] for _ in range(part.count)]
        sampler.rows = StepRows(trees, histories, np.zeros(part.count, dtype=bool))
        emitted = sampler(SimpleNamespace(), None, logits, part.metadata()).sampled_token_ids.numpy()
        for place in range(emitted.shape[1]):
            alive = (emitted[:, place] >= 0) & (done[open_rows] < LENGTH)
            rows = open_rows[alive]
            out[rows, done[rows]] = last[rows] = emitted[alive, place]
            done[rows] += 1
    return out


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    """P-value of counts under p; cells that cannot occur must be empty, rare ones are put together."""
    assert not counts[p == 0].any(), "an impossible token was emitted"
    wanted = p * counts.sum()
    common = wanted >= 5
    observed, wanted = (np.append(x[common], x[~common & (p > 0)].sum()) for x in (counts, wanted))
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) < 2:
        return 1.0
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(wanted) - 1) / 2.0).double(), torch.tensor(statistic / 2)))


def p_values(found: np.ndarray, chain: np.ndarray) -> Iterator[float]:
    """Of single tokens and of pairs, at depths 0, 1 and 2."""
    start = np.zeros(VOCAB)
    start[0] = 1
    at = [start @ chain]
    while len(at) < LENGTH:
        at.append(at[-1] @ chain)
    for place in range(LENGTH):
        yield chi_square(np.bincount(found[:, place], minlength=VOCAB), at[place])
    for place in range(LENGTH - 1):
        pairs = np.bincount(found[:, place] * VOCAB + found[:, place + 1], minlength=VOCAB**2)
        yield chi_square(pairs, (at[place][:, None] * chain).ravel())


def smallest_p(make: Callable[[Sampler], Any], case: dict[str, Any], drafts: Callable[..., TreeDraft]) -> float:
    torch.manual_seed(3)
    host = Sampler()
    sampler = TreeSampler(make(host))
    if drafts is drawn_drafts:
        sampler.judge_proposals()
    found = [sequences(sampler, Asked(BATCH, **case), drafts, seed) for seed in range(ROUNDS)]
    return min(p_values(np.concatenate(found), expected(**case)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_emitted_tokens_have_the_targets_distribution(case):
    assert smallest_p(lambda host: host, case, likeliest_drafts) > 1e-4


@pytest.mark.parametrize("case", [CASES[0], CASES[4], CASES[6], CASES[8], CASES[10]], ids=str)
def test_drawn_candidates_leave_the_distribution_alone(case):
    assert smallest_p(lambda host: host, case, drawn_drafts) > 1e-4


class Forgetful:
    """Wrong: the temperature holds for the first token of a step only."""

    def __init__(self, host: Sampler) -> None:
        self.host, self.rows = host, None

    def __call__(self, logits: torch.Tensor, sampling: SamplingMetadata) -> Any:
        first = self.rows is None or logits.shape[0] >= self.rows
        self.rows = logits.shape[0]
        warm = sampling if first else replace(sampling, temperature=torch.ones_like(sampling.temperature))
        return self.host(logits, warm)


class Repeating(Forgetful):
    """Wrong: every depth draws with the same randomness."""

    def __call__(self, logits: torch.Tensor, sampling: SamplingMetadata) -> Any:
        if self.rows is None or logits.shape[0] >= self.rows:
            self.state = torch.get_rng_state()
        self.rows = logits.shape[0]
        torch.set_rng_state(self.state)
        return self.host(logits, sampling)


class Eager(Forgetful):
    """Wrong: an unlikely token is drawn once more, as if to be kind to drafts."""

    def __call__(self, logits: torch.Tensor, sampling: SamplingMetadata) -> Any:
        output = self.host(logits.clone(), sampling)
        again = self.host(logits.clone(), sampling)
        chosen = output.sampled_token_ids.long()
        unlikely = logits.softmax(1).gather(1, chosen) < 0.02
        output.sampled_token_ids = again.sampled_token_ids.where(unlikely, output.sampled_token_ids)
        return output


@pytest.mark.parametrize("mutant", [Forgetful, Repeating, Eager])
def test_wrong_samplers_are_caught(mutant):
    assert smallest_p(mutant, {"temperature": 2.0}, likeliest_drafts) < 1e-9


def test_a_wrong_residual_is_caught(monkeypatch):
    """Drawn candidates, judged as if nothing were refused."""
    from vllm_medusa.host.v1 import proposals
    from vllm_medusa.tree.rejection import recursive_rejection

    def careless(target, proposal, children, uniforms):
        return recursive_rejection(target, torch.ones_like(proposal) / VOCAB, children, uniforms)

    monkeypatch.setattr(proposals, "recursive_rejection", careless)
    assert smallest_p(lambda host: host, {"temperature": 1.0}, drawn_drafts) < 1e-9


def test_mixed_batches():
    """Requests of three kinds in one batch, each with its own distribution."""
    torch.manual_seed(4)
    sampler = TreeSampler(Sampler())
    heats, ks, ps = (0.3, 1.0, 2.0), (VOCAB, 3, VOCAB), (1.0, 1.0, 0.8)

    class Mixed(Asked):
        def metadata(self) -> SamplingMetadata:
            kind = torch.arange(self.count) % 3
            return replace(
                super().metadata(),
                temperature=torch.tensor(heats)[kind],
                top_k=torch.tensor(ks, dtype=torch.int32)[kind],
                top_p=torch.tensor(ps)[kind],
            )

    rng = np.random.default_rng(8)
    firsts = []
    for _ in range(ROUNDS):
        trees = laid(likeliest_drafts(rng, BATCH - BATCH % 3))
        row_tokens = np.concatenate([np.zeros((len(trees.requests), 1), dtype=np.int64), trees.tokens], axis=1)
        logits = LOGITS[torch.from_numpy(row_tokens[trees.on_row])].clone()
        sampler.rows = StepRows(trees, [[] for _ in trees.requests], np.zeros(len(trees.requests), dtype=bool))
        asked = Mixed(len(trees.requests))
        firsts.append(sampler(SimpleNamespace(), None, logits, asked.metadata()).sampled_token_ids.numpy()[:, :2])
    found = np.concatenate([f if f.shape[1] == 2 else np.pad(f, ((0, 0), (0, 1)), constant_values=-1) for f in firsts])
    for kind, (heat, k, p) in enumerate(zip(heats, ks, ps, strict=True)):
        chain = expected(temperature=heat, top_k=k, top_p=p)
        own = found[np.arange(len(found)) % 3 == kind]
        assert chi_square(np.bincount(own[:, 0], minlength=VOCAB), chain[0]) > 1e-4
        for first in range(VOCAB):
            second = own[(own[:, 0] == first) & (own[:, 1] >= 0)][:, 1]
            if len(second) > 200:
                assert chi_square(np.bincount(second, minlength=VOCAB), chain[first]) > 1e-5


def test_drawn_candidates_are_drawn_without_replacement():
    torch.manual_seed(1)
    scores = HEADS[0].log_softmax(0)
    found = draw_children(scores.expand(100_000, VOCAB), 3, torch.rand(100_000, VOCAB)).numpy()
    assert all(len(set(row)) == 3 for row in found[:500])
    p = scores.exp().double().numpy()
    p /= p.sum()
    assert chi_square(np.bincount(found[:, 0], minlength=VOCAB), p) > 1e-4
    pairs = p[:, None] * np.where(np.eye(VOCAB), 0, p[None, :]) / (1 - p)[:, None]
    assert chi_square(np.bincount(found[:, 0] * VOCAB + found[:, 1], minlength=VOCAB**2), pairs.ravel()) > 1e-4
