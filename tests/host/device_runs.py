"""What tests of Model Runner V2 run in the interpreter's process: the same asked of plain vLLM and of trees."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import interpreter
import numpy as np
import torch
from device_engines import NODES, DeviceOracle, Steps, any_tree, drafting, engine
from engines import VOCAB, Engine, random_prompts
from recorded_runs import record as record
from waiting import NoWaiting

from vllm_medusa.tree.topology import Tree
from vllm_medusa.trust import Trust

STATIC = Tree((0, 0, 1, 1, 2, 3, 3, 7))
Params = list[dict[str, Any]]


def static(_: Any) -> Tree:
    """The same tree each time."""
    return STATIC


def deep(_: Any) -> Tree:
    """One path."""
    return Tree(tuple(range(NODES)))


def greedy(count: int = 4, tokens: int = 22) -> Params:
    """Greedy requests."""
    return [{"temperature": 0, "max_tokens": tokens}] * count


def seeded(count: int = 4, tokens: int = 16, **more: Any) -> Params:
    """Sampled requests with a seed each."""
    return [
        {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": i, "max_tokens": tokens, **more} for i in range(count)
    ]


def answers(engine: Engine, prompts: Sequence[Sequence[int]], params: Any) -> list[tuple[list[int], Any]]:
    """Tokens of each request, and its log-probabilities."""
    said = []
    for completion in engine.answer(prompts, params):
        logprobs = completion.logprobs and [
            [(token, entry.logprob, entry.rank) for token, entry in place.items()] for place in completion.logprobs
        ]
        said.append((list(completion.token_ids), logprobs))
    return said


def differences(plain: Sequence[Any], trees: Sequence[Any]) -> list[str]:
    """What trees answered otherwise; log-probabilities may differ by float32's rounding."""
    wrong = []
    for row, ((tokens, logprobs), (told, shown)) in enumerate(zip(plain, trees, strict=True)):
        if tokens != told:
            wrong.append(f"request {row}: {told} in place of {tokens}")
        elif logprobs is not None:
            for place, (expected, found) in enumerate(zip(logprobs, shown, strict=True)):
                same = [(token, rank) for token, _, rank in expected] == [(token, rank) for token, _, rank in found]
                if not same or not np.allclose([e[1] for e in expected], [f[1] for f in found], atol=1e-4):
                    wrong.append(f"request {row}, token {place}: {found} in place of {expected}")
    return wrong


def compare(
    model: Path,
    heads: Path,
    lengths: list[int],
    params: Params,
    *,
    shape: Callable[[np.random.Generator], Tree] | None = any_tree,
    change: str = "",
    repeats: int = 1,
    shared: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Ask both the same, tree drafts holding the true continuation more often than not.

    Args:
        model, heads: folders.
        lengths: of random prompts.
        params: of each, as `SamplingParams` takes them; `bad` are sequences of tokens that are forbidden.
        shape: of each draft; None: the heads draft.
        change: a key of CHANGES.
        repeats: how often each prompt says the same.
        shared: options of both engines.
        options: of the engine with trees.
    """
    prompts = [repeats * prompt for prompt in random_prompts(np.random.default_rng(3), lengths)]
    shared = shared or {}
    plain = answers(engine(model, **shared), prompts, sampling(params))
    limit = options.get("max_model_len", 512)
    plain = [(a[: limit - len(p)], b and b[: limit - len(p)]) for p, (a, b) in zip(prompts, plain, strict=True)]
    trees = engine(model, heads, **shared, **options)
    scheduler = trees.llm.llm_engine.engine_core.engine_core.scheduler
    free, preempted = trees.free_blocks, []
    texts = [prompt + tokens for prompt, (tokens, _) in zip(prompts, plain, strict=True)]
    oracle = DeviceOracle(trees, texts, shape or any_tree, VOCAB)
    oracle.greedy = params == greedy(len(params), params[0]["max_tokens"]) and not change
    oracle.must_know = not change
    with ExitStack() as stack:
        preempt = scheduler._preempt_request
        scheduler._preempt_request = lambda *a, **k: (preempted.append(1), preempt(*a, **k))[1]
        stack.callback(setattr, scheduler, "_preempt_request", preempt)
        steps = stack.enter_context(Steps(trees))
        stack.enter_context(CHANGES[change](trees))
        if shape is not None:
            stack.enter_context(drafting(oracle))
        trees.runner.medusa_report(reset=True)
        trees.runner.learning.trust = trust = Trust()
        trust._at = math.inf  # nothing fades, so that all of it adds up
        said = answers(trees, prompts, sampling(params))
    assert trees.free_blocks == free, "blocks are not given back"
    return {
        "differences": differences(plain, said),
        "length": steps.length,
        "report": trees.runner.medusa_report(),
        "reach": reach.values().tolist() if (reach := trees.runner.learning.reach) else None,
        "checked": oracle.checked,
        "below_root": oracle.below_root,
        "preempted": len(preempted),
        "widths": (trees.runner.learning.widths, scheduler.dynamic_sd_lookup),
        "plain": [tokens for tokens, _ in plain],
        "replays": getattr(trees.runner.cudagraph_manager, "replays", 0),
        "filled": getattr(trees.runner.cudagraph_manager, "filled", 0),
    }


def sampling(params: Params) -> list[Any]:
    """As the host takes them."""
    from vllm import SamplingParams

    asked = []
    for given in params:
        made = SamplingParams(**{"ignore_eos": True, **{key: value for key, value in given.items() if key != "bad"}})
        made._bad_words_token_ids = [list(word) for word in given.get("bad", [])] or None
        asked.append(made)
    return asked


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def unchanged(_: Engine) -> Iterator[None]:
    """Nothing is changed."""
    yield


def no_commit(engine: Engine) -> Any:
    """A fault: accepted keys and values stay where they were checked."""
    return _replaced(engine.runner.model_state.tree_cache, "commit", lambda *_: None)


def flat_positions(engine: Engine) -> Any:
    """A fault: a node's position is its slot."""
    trees, lay = engine.runner.trees, engine.runner.trees.lay

    def flat(batch: Any) -> None:
        before = batch.positions.clone()
        lay(batch)
        batch.positions.copy_(before)

    return _replaced(trees, "lay", flat)


@contextmanager
def no_history(_: Engine) -> Iterator[None]:
    """A fault: processors do not see the tokens of a node's path."""
    from vllm_medusa.host.v2 import sampling

    with _replaced(sampling, "_reads_history", lambda *_: False), _replaced(sampling, "ROWS_OF_A_ROUND", 0):
        yield


def small_parts(engine: Engine) -> Any:
    """As if two rows of logits were a gigabyte."""
    from vllm_medusa.host.v2 import sampling

    return _replaced(sampling, "get_max_chunk_logits", lambda _: 2)


@contextmanager
def watched(engine: Engine) -> Iterator[None]:
    """Draft, walk and what leads to the commit fail where they would wait for a device; with a GPU's attention metadata
    and commit do too. The heads take the way that is no CPU's own; calls of the host do as they like."""
    from vllm_medusa.attention.triton_mover import SlotMover
    from vllm_medusa.heads import native
    from vllm_medusa.host.v2 import device_cache, sampling
    from vllm_medusa.host.v2.slots import StepTrees

    runner, mode = engine.runner, NoWaiting()

    def in_mode(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.add(name)
            with mode:
                return function(*args, **kwargs)

        return call

    def outside(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with mode.pause():
                return function(*args, **kwargs)

        return call

    calls: set[str] = set()
    heads = runner.drafter.heads
    ours = [(runner.trees, "lay"), (runner.trees, "put"), (runner.speculator, "propose"), (runner, "rejection_sampler")]
    ours += [(runner.counts, "count"), (StepTrees, "moves")]
    theirs = [(runner.sampler, "sample")]
    cache = runner.model_state.tree_cache
    if isinstance(cache, device_cache.DeviceTreeCache):
        ours += [(cache, "attach"), (cache, "commit")]
        theirs += [(device_cache, "build_attn_metadata"), (SlotMover, "move")]
    theirs += [(sampling, "compute_topk_scores"), (sampling, "get_num_sampled_and_rejected")]
    with ExitStack() as stack:
        for owner, name in ours:
            stack.enter_context(_replaced(owner, name, in_mode(name, getattr(owner, name))))
        for owner, name in theirs:
            stack.enter_context(_replaced(owner, name, outside(getattr(owner, name))))
        stack.enter_context(_replaced(heads, "_frozen", None))
        stack.enter_context(_replaced(native, "best_tokens", lambda *_: None))
        yield
    assert calls == {name for _, name in ours}, calls


def old_rows(engine: Engine) -> Any:
    """A fault: what rows may see stays as it was."""
    return _replaced(engine.runner.trees.rows, "put", lambda *_: None)


def old_context(engine: Engine) -> Any:
    """A fault: how many tokens are cached stays as it was."""
    rows = engine.runner.trees.rows
    return _replaced(rows, "set_context", lambda lengths, _: rows.context[: len(lengths)])


def no_masks(engine: Engine) -> Any:
    """As if the host's grammar masks covered no draft."""
    sampler = engine.runner.rejection_sampler

    def call(logits: Any, batch: Any, draft_logits: Any, invalid: Any) -> Any:
        return sampler(logits, batch, draft_logits, batch.expanded_local_pos > 0)

    return _replaced(engine.runner, "rejection_sampler", call)


def padded(engine: Engine) -> Any:
    """The host fills new requests' drafts up to the full number, as it does for the sake of CUDA graphs."""
    return _replaced(engine.llm.llm_engine.engine_core.engine_core.scheduler, "dynamic_sd_lookup", None)


def flat_heads(engine: Engine) -> Any:
    """Heads that know which tokens are asked for (20 to 51) and nothing else."""
    heads = engine.runner.drafter.heads
    known = (torch.arange(heads.config.num_outputs) >= 20) & (torch.arange(heads.config.num_outputs) < 52)
    logits = torch.where(known, 60.0, 0.0)
    return _replaced(heads, "forward", lambda hidden, _: logits.expand(len(hidden), heads.config.num_heads, -1))


CHANGES = {"": unchanged} | {
    f.__name__: f
    for f in (
        *(no_commit, flat_positions, no_history, no_masks, small_parts, watched, padded, old_rows, old_context),
        flat_heads,
    )
}


def prefix_cache(model: Path, heads: Path, *, change: str = "", **options: Any) -> tuple[list[str], list[int]]:
    """A second round of requests goes on where the first one's answers end, reading them from the cache.

    Returns:
        Differences from plain vLLM, and how many tokens each of the second round found in the cache.
    """
    first, second = sampling(greedy(2, 40)), sampling([{"temperature": 0, "max_tokens": 8, "logprobs": 2}] * 2)
    prompts = random_prompts(np.random.default_rng(8), [5, 33])
    plain = engine(model)
    told = plain.tokens(prompts, first)
    longer = [p + t for p, t in zip(prompts, told, strict=True)]
    rest = answers(plain, longer, second)
    trees = engine(model, heads, enable_prefix_caching=True, **options)
    assert trees.llm.reset_prefix_cache()
    oracle = DeviceOracle(trees, [p + t for p, (t, _) in zip(longer, rest, strict=True)], any_tree, VOCAB)
    oracle.must_know = not change
    with CHANGES[change](trees), drafting(oracle):
        wrong = [] if trees.tokens(prompts, first) == told else ["the first round"]
        outputs = trees.llm.generate([{"prompt_token_ids": p} for p in longer], second, use_tqdm=False)
        wrong += differences(rest, [(list(o.outputs[0].token_ids), _logprobs(o.outputs[0])) for o in outputs])
    return wrong, [output.num_cached_tokens for output in outputs]


def told(model: Path, heads: Path, **options: Any) -> tuple[dict[str, float], str]:
    """What an engine shows of three requests at a time: seconds by stage in its metrics, and its line in the log."""
    from prometheus_client import REGISTRY

    from vllm_medusa.host.metrics.figures import Counts
    from vllm_medusa.host.metrics.logline import describe

    def seconds() -> dict[str, float]:
        return {
            sample.labels["stage"]: sample.value
            for family in REGISTRY.collect()
            for sample in family.samples
            if sample.name == "vllm_medusa:stage_seconds_total"
        }

    trees = engine(model, heads, **options)
    before: dict[str, float] = seconds()
    reports: list[Counts] = []
    put = type(trees.runner)._tell

    def tell(self: Any, output: Any) -> None:
        put(self, output)
        if (figures := getattr(output, "medusa_figures", None)) is not None:
            reports.append(figures.counts)

    trees.runner._figures_due = 0.0
    with _replaced(type(trees.runner), "_tell", tell):
        trees.tokens(random_prompts(np.random.default_rng(4), [5, 6, 7]), sampling(greedy(3, 30)))
    total = Counts()
    for counts in reports:
        total.add(counts)
    return {stage: value - before.get(stage, 0.0) for stage, value in seconds().items()}, describe(total, None)


def counted(model: Path, heads: Path, **options: Any) -> dict[str, Any]:
    """Three requests, one of which ends by a stop token inside its path: what they got, and what was counted of it."""
    plain, trees = engine(model), engine(model, heads, per_request_spec_decode_metrics="detailed", **options)
    prompts = random_prompts(np.random.default_rng(12), [5, 9, 14, 20, 7, 11])
    truth = plain.tokens(prompts, sampling(greedy(6, 40)))
    news = [max(place for place, token in enumerate(t) if token not in t[:place]) for t in truth]
    first = int(np.argmax(news))  # whose text has something new latest: it ends there
    order = [first, *(row for row in range(6) if row != first)][:3]
    prompts, truth = [prompts[row] for row in order], [truth[row] for row in order]
    asked = sampling([{"temperature": 0, "max_tokens": n} for n in (40, 14, 21)])
    asked[0].stop_token_ids = [truth[0][news[first]]]
    oracle = DeviceOracle(trees, [p + t for p, t in zip(prompts, truth, strict=True)], deep, VOCAB)
    oracle.misses, oracle.must_know = 0.0, False
    core = trees.llm.llm_engine.engine_core.engine_core
    scheduler = core.scheduler
    take, update = scheduler._outbox.take, scheduler._update_request_with_output
    told: list[Any] = []
    steps: list[int] = []

    def taken(*args: Any, **kwargs: Any) -> Any:
        if (figures := take(*args, **kwargs)) is not None:
            told.append(figures.counts)
        return figures

    def updated(*args: Any, **kwargs: Any) -> Any:
        emitted, stopped = update(*args, **kwargs)
        steps.append(len(emitted))
        return emitted, stopped

    with ExitStack() as stack:
        stack.enter_context(drafting(oracle))
        stack.enter_context(_replaced(scheduler._outbox, "take", taken))
        stack.enter_context(_replaced(scheduler, "_update_request_with_output", updated))
        for _ in range(2):  # what the first time leaves over comes with the second
            trees.runner.medusa_report(reset=True)
            trees.runner._figures_due = 0.0
            steps.clear()
            said = trees.answer(prompts, asked)
            while scheduler.has_requests():
                core.step_fn()
    return {
        "expected": [news[first] + 1, 14, 21],
        "got": [len(completion.token_ids) for completion in said],
        "accepted": sum(sum(completion.spec_decode_metrics.per_step_accepted) for completion in said),
        "steps": len(steps) - len(said),  # the first of each computes its prompt
        "report": trees.runner.medusa_report(),
        "least": min(min([c.emitted_tokens, *c.accepted_by_depth, *c.request_steps.values()]) for c in told),
    }


def sessions(model: Path, heads: Path, firsts: list[int], seconds: list[int], **options: Any) -> dict[str, Any]:
    """Sessions of two turns of all these lengths, one turn after the other."""
    from sessions import Session, talk

    plain, trees = engine(model), engine(model, heads, **options)
    wrong = []
    rng = np.random.default_rng(6)
    with Steps(trees) as steps:
        for first in firsts:
            prompts = random_prompts(rng, rng.integers(1, 40, 2 * len(seconds)).tolist())
            made = [
                Session([(prompts.pop(), {"max_tokens": first}), (prompts.pop(), {"max_tokens": second})])
                for second in seconds
            ]
            expected = talk(plain, made)
            texts = [session.text(turn) for session in made for turn in (0, 1)]
            longer = plain.tokens(texts, sampling([{"temperature": 0, "max_tokens": 20}] * len(texts)))
            oracle = DeviceOracle(trees, [t + a for t, a in zip(texts, longer, strict=True)], static, VOCAB)
            oracle.must_know, oracle.misses = False, 0.0
            with drafting(oracle):
                found = talk(trees, made)
            wrong += [f"{first}: {a} in place of {b}" for a, b in zip(found, expected, strict=True) if a != b]
    return {"differences": wrong, "length": steps.length}


def nans(model: Path, heads: Path, **options: Any) -> dict[str, int]:
    """NaNs that three requests are told of when there are three in a row of the second one.

    For steps without trees vLLM counts by a kernel that the interpreter cannot run.
    """
    from vllm.v1.worker.gpu.sample import sampler

    trees = engine(model, heads, **options)
    runner, host = trees.runner, trees.llm.llm_engine
    compute = runner.model.compute_logits

    def compute_logits(hidden: Any, *args: Any) -> Any:
        logits = compute(hidden, *args)
        step = runner.trees.step
        if step is not None and len(logits) > step.batch.num_reqs:
            for row, name in enumerate(step.batch.req_ids):
                if name.startswith("second"):
                    logits[int(step.first_logit[row]), :3] = torch.nan
        return logits

    told = {"first": 0, "second": 0, "third": 0}
    with ExitStack() as stack:
        stack.enter_context(_replaced(sampler, "get_num_nans", lambda logits: logits.isnan().sum(1, dtype=torch.int32)))
        stack.enter_context(_replaced(runner.sampler, "compute_nans", True))
        stack.enter_context(_replaced(runner.model, "compute_logits", compute_logits))
        prompts = random_prompts(np.random.default_rng(5), [5, 6, 7])
        for name, prompt, params in zip(told, prompts, sampling(greedy(3, 4)), strict=True):
            host.add_request(name, {"prompt_token_ids": prompt}, params)
        core = host.engine_core.engine_core
        while core.scheduler.has_requests() or core.batch_queue:
            outputs, executed = core.step_fn()
            core.post_step(executed)
            for output in (o for by_client in (outputs or {}).values() for o in by_client.outputs):
                name = output.request_id.split("-")[0]
                told[name] = max(told[name], output.num_nans_in_logits)
    return told


def _logprobs(completion: Any) -> Any:
    return [[(token, e.logprob, e.rank) for token, e in place.items()] for place in completion.logprobs]


def grammar(
    model: Path,
    heads: Path,
    kinds: list[str | None],
    *,
    is_async: bool,
    shared: dict[str, Any] | None = None,
    ends_thoughts: float = 0.0,
    budgets: list[int | None] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Requests with and without a grammar (see `test_grammar.params_for`).

    Args:
        model, heads: folders.
        kinds: of grammar.
        is_async: as of `compare`.
        shared: options of both engines.
        ends_thoughts: bias towards the token that ends a thought.
        budgets: tokens that each request may think.
        more: parameters of all requests.
    """
    from test_grammar import params_for, prompt_ids

    options = {"skip_tokenizer_init": False, **(shared or {})}
    plain, trees = engine(model, **options), engine(model, heads, is_async=is_async, **options)
    prompts = prompt_ids(plain, len(kinds))
    begin, end = plain.llm.get_tokenizer().convert_tokens_to_ids(["<think>", "</think>"])
    if ends_thoughts:
        more["logit_bias"] = {end: ends_thoughts}
    params = [params_for(kind, **{"max_tokens": 24, **more}) for kind in kinds]
    for request, budget in zip(params, budgets or [], strict=False):
        request.thinking_token_budget = budget
    if budgets:
        prompts = [[*prompt, begin] for prompt in prompts]
    truth = answers(plain, prompts, params)
    texts = [p + t for p, (t, _) in zip(prompts, truth, strict=True)]
    oracle = DeviceOracle(trees, texts, any_tree, len(plain.llm.get_tokenizer()))
    with drafting(oracle), Steps(trees) as steps:
        said = answers(trees, prompts, params)
    thought = [tokens.index(end) if end in tokens else None for tokens, _ in truth]
    return {"differences": differences(truth, said), "length": steps.length, "thought": thought}


def said(model: Path, _: Path, lengths: list[int], params: Params) -> list[list[int]]:
    """What plain vLLM says to the prompts of `compare`."""
    return engine(model).tokens(random_prompts(np.random.default_rng(3), lengths), sampling(params))


def hosts_kernel(model: Path, heads: Path, lengths: list[int], params: Params, **options: Any) -> dict[str, Any]:
    """As `compare`, all of plain vLLM's attention by its own Triton kernel."""
    interpreter.HOSTS_KERNEL = True
    try:
        return compare(model, heads, lengths, params, shared={"attention": "TRITON_ATTN"}, **options)
    finally:
        interpreter.HOSTS_KERNEL = False


def looks_at_kernels(model: Path, heads: Path, *, attention: str, error: float) -> str:
    """What an engine says when its kernels are looked at, as before it serves on a GPU; `error` is added to theirs."""
    from vllm_medusa.attention import triton_check
    from vllm_medusa.errors import MedusaError

    kernel = triton_check.tree_attention

    def spoilt(query: Any, keys: Any, values: Any, out: Any, **given: Any) -> None:
        kernel(query, keys, values, out, **given)
        out[-1] += error

    try:
        with _replaced(triton_check, "tree_attention", spoilt):
            engine(model, heads, is_async=True, attention=attention).runner.warm_up_trees()
    except MedusaError as refusal:
        return str(refusal)
    return "serves"


def refuses_attention(model: Path, heads: Path) -> str:
    """What an engine says whose layers attend by a host's attention that trees cannot share a cache with."""
    from vllm_medusa.errors import MedusaError
    from vllm_medusa.host import device_attention

    try:
        with _replaced(device_attention, "HOSTS_OWN", (device_attention.FlashAttentionImpl,)):
            engine(model, heads, attention="TRITON_ATTN", max_num_seqs=5)
    except MedusaError as refusal:
        return str(refusal)
    return "serves"


def noise() -> list[str]:
    """Where the largest of perturbed logits is not what the host's sampler draws."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    from vllm_medusa.host.v2.noise import SharedNoise

    torch.manual_seed(0)
    slots, roots = torch.tensor([3, 0, 2]), torch.tensor([17, 4, 900])
    temperatures = torch.tensor([0.7, 1.0, 0.0, 2.5])
    seeds, heads, vocab = torch.randint(1 << 62, (4,)), 3, 1500
    logits = 2 * torch.randn(len(slots), heads, vocab)
    of_row, positions = slots.repeat_interleave(heads), (roots[:, None] + torch.arange(heads)).flatten()
    wrong = []
    for fp64 in (False, True):
        perturb = SharedNoise(slots, roots, temperatures, seeds, fp64)
        for tokens in (torch.arange(vocab), torch.randperm(vocab)[:300].sort().values):
            few = torch.full_like(logits, -torch.inf)
            few[..., tokens] = logits[..., tokens]
            options = {"apply_temperature": True, "is_drafting": False, "use_fp64": fp64}
            drawn = gumbel_sample(few.flatten(0, 1), of_row, temperatures, seeds, positions, **options)
            found = perturb(logits[..., tokens], None if len(tokens) == vocab else tokens).argmax(-1)
            if tokens[found].flatten().tolist() != drawn.tolist():
                wrong.append(f"{len(tokens)} tokens, float64: {fp64}: {tokens[found].tolist()}, {drawn.tolist()}")
    return wrong


def contract() -> list[str]:
    """What of the host is missing."""
    from vllm_medusa.host import compat

    return compat.find_problems(compat.full_contract() + compat.V2_CONTRACT + compat.GPU_CONTRACT)


def refusals(model: Path, heads: Path, cases: list[dict[str, Any]]) -> list[str]:
    """The error of each engine that must not start."""
    from engines import start

    from vllm_medusa.errors import MedusaError

    messages = []
    for case in cases:
        try:
            start(model, heads, max_model_len=512, block_size=32, **case)
            messages.append("it starts")
        except MedusaError as error:
            messages.append(str(error))
    return messages


def mismatch(model: Path, heads: Path, checked: str, found: str) -> str:
    """The error of a worker whose process reads `found` from the variable by which settings were `checked`."""
    from vllm import envs

    from vllm_medusa.host import tree_worker
    from vllm_medusa.host.choice import VARIABLE

    envs.disable_envs_cache()  # a process that serves keeps what it has read
    check = tree_worker.check_runner

    def elsewhere(config: Any) -> Any:
        os.environ[VARIABLE] = found
        return check(config)

    before = os.environ[VARIABLE]
    os.environ[VARIABLE] = checked
    try:
        with _replaced(tree_worker, "check_runner", elsewhere):
            return refusals(model, heads, [{}])[0]
    finally:
        os.environ[VARIABLE] = before


__all__ = ["NODES"]


def change_weights(model: Path, heads: Path, other: Path, way: str) -> dict[str, Any]:
    """See `new_weights.change`."""
    from new_weights import change

    return change(model, heads, other, way, begin=engine)
