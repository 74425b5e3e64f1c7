"""Runs schedules on tiny engines, step by step, and looks after each step for what must never happen."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from clock import ScriptedClock
from engines import Engine, start
from new_weights import lose
from outcomes import Running, Totals, Violation
from recompute import CachedBlocks
from schedules import BLOCK, EOS, LONGEST_ANSWER, MAX_LEN, MAX_NODES, Ask, Schedule, draw
from script import Script
from talking import Talking
from tiny_models import LOSE_WEIGHTS, MODELS, MORE, save
from tiny_targets import make_expert_group
from vllm.model_executor.layers.attention import Attention

from vllm_medusa.heads.checkpoint import load_heads
from vllm_medusa.host.commit import TreeKeyValues
from vllm_medusa.host.draft_room import DraftRoom
from vllm_medusa.host.metrics.figures import Outbox
from vllm_medusa.host.v1.drafting import Drafting
from vllm_medusa.proposer import _matrices
from vllm_medusa.tree.growth import grow_static

SEATS = 8  # of the engines; a schedule may set fewer
BLOCKS = 160
TIE = 1e-4  # logits are up to 50 and rounded to 4e-6, several times; in 120,000 tokens one pair was 3e-6 apart
IMPOSSIBLE = 1e-9  # the chance of a token that was drawn: in a million draws of 160 tokens not once in ten
OPTIONS: dict[str, Any] = {"max_model_len": MAX_LEN, "block_size": BLOCK, "max_num_seqs": SEATS}
PLAIN = {"max_num_seqs": 64, "max_num_batched_tokens": 64 * MAX_LEN, "num_gpu_blocks_override": 640}


class World:
    """Two engines of one tiny model, plain and with trees, and schedules run on them."""

    def __init__(self, name: str, model: Path, heads: Path, whole_cache: bool = False) -> None:
        """Start both.

        Args:
            name: as schedules call the model.
            model, heads: their folders.
            whole_cache: recompute every cached block after each schedule, not a few.
        """
        self.name, self.model, self.heads = name, model, heads
        self.whole_cache = whole_cache
        self.options = {**OPTIONS, "skip_tokenizer_init": name != "speaker"}
        make_expert_group()
        # Seeded prompts must not be computed in pieces: plain vLLM on a CPU breaks on that.
        self.plain = start(model, **{**self.options, **PLAIN})
        self.totals = Totals()
        self.truths: dict[Any, list[int]] = {}
        self.running: dict[str, Running] = {}
        self.heard: list[Any] = []  # by sessions
        self.spoilt = False
        self.planted = True  # true continuations are, on whole trees
        self.sizes: list[tuple[int, int]] = []  # of steps: their tokens, drafted ones among them
        self.found: Violation | None = None
        self._start_trees()

    def _start_trees(self) -> None:
        self.broken = False
        medusa = {"num_speculative_tokens": MAX_NODES, "adaptive": False}
        self.trees: Engine = start(
            self.model, self.heads, **self.options, enable_prefix_caching=True, num_gpu_blocks_override=BLOCKS,
            scheduling_policy="priority", medusa=medusa, disable_log_stats=False,
        )  # fmt: skip
        self.engine = self.trees.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        layers = self.trees.runner.compilation_config.static_forward_context.values()
        self.layers = [layer for layer in layers if isinstance(layer, Attention)]  # experts are among them
        self.cached = CachedBlocks(self.model, self.trees.runner, self.pool)
        self.groups = len(self.trees.runner.kv_cache_config.kv_cache_groups)
        self.unpadded = self.scheduler.dynamic_sd_lookup  # as our scheduler has it
        self.all_blocks = self.pool.get_num_free_blocks()
        self._watch_scheduler()

    # The truth --------------------------------------------------------------------------------------------------

    def answer(self, ask: Ask) -> list[int]:
        """What plain decoding says to one request."""
        self.ask_plain([ask])
        return self.truths[_key(ask)][: ask.max_tokens]

    def truth(self, ask: Ask) -> list[int]:
        """The answer that plain decoding has given, as long as any schedule asks for."""
        return self.truths[_key(ask)]

    def ask_plain(self, asks: Sequence[Ask]) -> None:
        """Learn what plain decoding says to these requests."""
        unknown = list({_key(ask): ask for ask in asks if _key(ask) not in self.truths}.values())
        if unknown:
            params = [_params(ask, LONGEST_ANSWER) for ask in unknown]
            answers = self.plain.tokens([ask.prompt for ask in unknown], params)
            self.truths |= {_key(ask): said for ask, said in zip(unknown, answers, strict=True)}

    # One schedule -----------------------------------------------------------------------------------------------

    def violates(self, schedule: Schedule) -> Violation | None:
        """Run a schedule; what it found wrong, if anything. Afterwards the engines are as before."""
        try:
            self.run(schedule)
        except Violation as violation:
            return violation
        return None

    def run(self, schedule: Schedule) -> None:
        """Run a schedule.

        Raises:
            Violation: a promise is broken.
        """
        if self.broken:
            self._start_trees()
        self.ask_plain(schedule.asks)
        if self.spoilt:
            self.trees.runner.drafter.load_again()
            self.spoilt = False
        if self.scheduler.has_requests():  # that ended, of which the worker has not heard
            self.engine.step()
        torch.manual_seed(schedule.seed)  # of requests without a seed, and of vLLM's own draws
        with ExitStack() as stack:
            self._limit(schedule, stack)
            self.clock = ScriptedClock(schedule.seed, *schedule.clock)
            self.clock.rule(stack)
            self._draft_anew(schedule, stack)
            self.trees.runner._draft = Script(self, schedule)
            stack.callback(lambda: self.trees.runner.__dict__.pop("_draft", None))
            try:
                self._play(schedule)
                self._after()
            except Violation:
                self._recover()
                raise
            except Exception as error:
                self._recover()
                where = traceback.extract_tb(error.__traceback__)[-1]
                place = f"{Path(where.filename).name}:{where.lineno}"
                raise Violation("crash", f"{type(error).__name__} at {place}: {error}") from error
        self.totals.schedules += 1

    def _limit(self, schedule: Schedule, stack: ExitStack) -> None:
        """Set the host's limits, until the schedule is over."""
        from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue

        scheduler, config = self.scheduler, self.scheduler.scheduler_config
        if schedule.fresh:
            assert scheduler.reset_prefix_cache()
        policy = SchedulingPolicy.PRIORITY if schedule.by_priority else SchedulingPolicy.FCFS
        for owner, values in (
            (
                scheduler,
                {
                    "max_num_running_reqs": schedule.seats,
                    "max_num_active_reqs": schedule.seats,
                    "max_num_scheduled_tokens": schedule.budget,
                    "max_model_len": schedule.max_len,
                    "policy": policy,
                    "waiting": create_request_queue(policy),
                    "kv_holding_waiting": create_request_queue(policy),
                    "num_spec_tokens": schedule.nodes,
                    "dynamic_sd_lookup": None if schedule.padding else self.unpadded,
                },
            ),
            (config, {"long_prefill_token_threshold": schedule.piece}),
            (self.trees.runner.tree_cache, {"kept": TreeKeyValues(self.layers) if schedule.rewrites else None}),
        ):
            for name, value in values.items():
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
        needed = self.groups * -(-schedule.max_len // BLOCK) + schedule.spare_blocks
        self.held = self.pool.get_new_blocks(max(0, self.all_blocks - needed))
        stack.callback(lambda: self.pool.free_blocks(reversed(self.held)))
        self.free = self.pool.get_num_free_blocks()

    def _draft_anew(self, schedule: Schedule, stack: ExitStack) -> None:
        """Nothing learnt so far, and the settings of the schedule, until it is over."""
        runner = self.trees.runner
        drafter, sampler = runner.drafter, runner.tree_sampler
        settings = drafter.settings.model_copy(
            update={
                "num_speculative_tokens": schedule.nodes,
                "adaptive": schedule.adaptive,
                "prompt_lookup": schedule.lookup,
                "draft_sample_method": "probabilistic" if schedule.drawn else "greedy",
            }
        )
        for owner, name, value in (
            (drafter, "settings", settings),
            (self.scheduler, "_evens_out", schedule.adaptive),
            (self.scheduler, "_draft_room", DraftRoom(self.scheduler)),
            (self.scheduler, "log_stats", schedule.statistics),
            (self.scheduler, "_outbox", Outbox()),
            (runner, "_learnt_due", 0.0),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        if schedule.crowded:
            self.scheduler._draft_room.cut_drafts = lambda: None
        for owner, name in ((runner, "drafting"), (runner, "book")):
            stack.callback(setattr, owner, name, getattr(owner, name))
        runner.drafting = drafting = Drafting(runner, drafter)
        runner.book = drafting.book
        for tokens in (1, 8, 64, 256):
            drafting.cost.seed(tokens, self.clock.seconds(tokens))
        for requests in (1, 8):
            drafting.budget.heads_cost.seed(requests, self.clock.seconds(requests) / 10)
        if schedule.drawn:
            accuracy = [
                [0.3 / (rank + 1) for rank in range(drafter.top_k)] for _ in range(drafter.heads.config.num_heads)
            ]
            drafter.drawn_tree = grow_static(accuracy, schedule.nodes)
            drafter.drawn_reach = drafter.drawn_tree.reach(accuracy)
            for owner, name in ((sampler, "last_stage"), (sampler.sampler, "topk_topp_sampler")):
                stack.callback(setattr, owner, name, getattr(owner, name))
            sampler.judge_proposals()
        self.totals.adaptive += schedule.adaptive
        self.planted = schedule.source == "script" and not schedule.adaptive

    def _flush(self) -> None:
        """Running requests are preempted, the prefix cache is dropped."""
        count = self._let_go()
        self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.held = self.pool.get_new_blocks(count)
        self.totals.flushes += 1

    def _let_go(self) -> int:
        """Give back the blocks that are held so that few are left; how many they were."""
        self.pool.free_blocks(reversed(self.held))
        count, self.held = len(self.held), []
        return count

    def _can_reset(self) -> bool:
        """Whether vLLM can drop its cache: not while a session between two turns holds blocks."""
        return not (self.scheduler.kv_holding_waiting or self.scheduler.num_waiting_for_streaming_input)

    def _reload(self) -> None:
        """What an operator does whose weights are the same: they are loaded again while requests run."""
        if self.name in LOSE_WEIGHTS:
            return
        self.trees.llm.collective_rpc("reload_weights")
        self.totals.reloads += 1

    def _sleep(self, level: int) -> None:
        """The engine sleeps with requests under way, loses the cache, at level 2 all that came with the heads too."""
        count = self._let_go()
        self.core.sleep(level, mode="keep")
        if level == 2:
            lose(self.trees, target=False)  # on a CPU nothing is lost; the target would be the user's to load again
        self.core.wake_up()
        self.held = self.pool.get_new_blocks(count)
        self.totals.sleeps += 1

    def _play(self, schedule: Schedule) -> None:
        """Add, abort and step until nothing is left."""
        coming = sorted(schedule.asks, key=lambda ask: ask.arrives)
        self.running, self.found, tick = {}, None, 0
        flushes = list(schedule.flushes)
        reloads, sleeps = list(schedule.reloads), list(schedule.sleeps)
        talking = Talking(self, schedule.talks)
        aborts: dict[int, list[str]] = {}
        patience = 200 + sum(len(ask.prompt) + ask.max_tokens for ask in schedule.asks) * 4
        patience += talking.tokens * 8
        while coming or talking or self.engine.has_unfinished_requests():
            if coming and not talking and not self.engine.has_unfinished_requests():
                tick = max(tick, coming[0].arrives)
            talking.go_on(tick)
            while coming and coming[0].arrives <= tick:
                ask = coming.pop(0)
                name = self._add(ask, schedule)
                if ask.aborted is not None:
                    aborts.setdefault(tick + ask.aborted, []).append(name)
            for name in aborts.pop(tick, ()):
                self._abort(name)
            while flushes and flushes[0] <= tick and self._can_reset():
                flushes.pop(0)
                self._flush()
            while reloads and reloads[0] <= tick:
                reloads.pop(0)
                self._reload()
            while sleeps and sleeps[0][0] <= tick and self._can_reset():
                self._sleep(sleeps.pop(0)[1])
            self._step()
            talking.listen()
            tick += 1
            patience -= 1
            if patience < 0:
                raise Violation("hang", f"requests {sorted(self.running)} do not end")
        self._step()  # one more, in which the worker hears of the last ones that finished

    def _add(self, ask: Ask, schedule: Schedule) -> str:
        longer = self.truths[_key(ask)]
        truth = longer[: min(ask.max_tokens, schedule.max_len - len(ask.prompt))]
        name = self.engine.add_request(
            f"{ask.number}",
            {"prompt_token_ids": list(ask.prompt)},
            _params(ask, ask.max_tokens),
            priority=ask.priority if schedule.by_priority else 0,
            arrival_time=float(len(self.running)),
        )
        free = schedule.drawn and ask.sampling["temperature"] > 0 and "grammar" not in ask.sampling
        self.running[name] = Running(ask, truth, longer, free=free)
        self._wait_for_grammar(name)
        self.totals.requests += 1
        return str(name)

    def _wait_for_grammar(self, name: str) -> None:
        """vLLM compiles it in a thread: how many empty steps that takes would be the machine's to say."""
        asked, until = self.scheduler.requests[name].structured_output_request, time.monotonic() + 60.0
        while asked is not None and not asked.is_grammar_ready:
            if time.monotonic() > until:
                raise Violation("hang", f"the grammar of {name} is not compiled")
            time.sleep(0.001)

    def _abort(self, name: str) -> None:
        if not self.running[name].done:
            self.running[name].done = True
            self.totals.aborted += 1
            self.engine.abort_request([name], internal=True)

    def _step(self) -> None:
        outputs = self.engine.step()
        self.totals.steps += 1
        if self.found is not None:
            raise self.found
        entries = {f"{entry.ask.number}": entry for entry in self.running.values()}
        for output in outputs:
            self._compare(entries[output.request_id], output)
        self._look_at_trees()
        self._look_at_lengths()

    # Promises ---------------------------------------------------------------------------------------------------

    def _compare(self, entry: Running, output: Any) -> None:
        """What a request has said so far is what plain decoding says."""
        said = list(output.outputs[0].token_ids)
        self.totals.tokens += len(said) - len(entry.seen)
        self.totals.request_steps += 1
        if self.planted:
            self.totals.planted_tokens += len(said) - len(entry.seen)
            self.totals.planted_steps += 1
        entry.seen = said
        if entry.free:
            if output.finished:
                self._is_possible(entry, said)
        elif not entry.tied and said != (entry.truth if output.finished else entry.truth[: len(said)]):
            at = next((i for i, (a, b) in enumerate(zip(said, entry.truth, strict=False)) if a != b), len(said))
            entry.tied = self._is_tie(entry, said, at)
            self.totals.ties += entry.tied
            if not entry.tied:
                raise Violation(
                    "tokens", f"request {entry.ask.number} differs at {at}: {said} instead of {entry.truth}"
                )
        if output.finished:
            entry.done = True
            self.totals.cached_tokens += output.num_cached_tokens or 0

    def _is_possible(self, entry: Running, said: Sequence[int]) -> None:
        """An answer of drawn candidates ends where it must, and holds no token that its parameters rule out."""
        sampling, most = entry.ask.sampling, len(self._limited(entry))
        stops = {*sampling.get("stop_token_ids", ())} | (set() if sampling.get("ignore_eos") else {EOS})
        least = min(sampling.get("min_tokens", 0), entry.ask.max_tokens)
        ends = [place for place, token in enumerate(said) if token in stops and place >= least]
        if (ends and ends[0] != len(said) - 1) or (not ends and len(said) != most) or len(said) > most:
            raise Violation("tokens", f"request {entry.ask.number} of {most} tokens at most ends so: {said}")
        if not set(sampling) <= _SAYS_ARGMAX | {"seed", "top_k", "top_p"}:
            return
        scores = self.cached.all_logits([*entry.ask.prompt, *said])[len(entry.ask.prompt) - 1 : -1]
        scores = scores / sampling["temperature"]
        own = scores.gather(1, torch.tensor(said)[:, None])
        better, chances = (scores > own + TIE).sum(dim=1), scores.softmax(dim=-1).gather(1, torch.tensor(said)[:, None])
        for at, token in enumerate(said):
            if better[at] >= sampling.get("top_k", scores.shape[1]) or chances[at] < IMPOSSIBLE:
                chance = f"chance {float(chances[at]):.1g}, {int(better[at])} are likelier"
                raise Violation("tokens", f"request {entry.ask.number}: {token} at {at}: {chance}")

    def _limited(self, entry: Running) -> list[int]:
        """A list as long as the answer may be."""
        room = self.scheduler.max_model_len - len(entry.ask.prompt)
        return [0] * min(entry.ask.max_tokens, room)

    def _is_tie(self, entry: Running, said: Sequence[int], at: int) -> bool:
        """Whether two tokens score the same at one place but for rounding, so that either is right."""
        sampling = entry.ask.sampling
        if at >= min(len(said), len(entry.truth)) or not set(sampling) <= _SAYS_ARGMAX or sampling["temperature"] > 0:
            return False
        scores = self.cached.logits([*entry.ask.prompt, *said[:at]])
        return abs(float(scores[said[at]] - scores[entry.truth[at]])) < TIE

    def _look_at_trees(self) -> None:
        """No tree of a request that the worker has dropped or that lost its cache."""
        kept = set(self.trees.runner.book._drafts)
        for name in kept:
            request = self.scheduler.requests.get(name)
            if name not in self.trees.runner.requests:
                raise Violation("stale tree", f"{name} has ended, its tree is kept")
            if request is not None and request.num_computed_tokens == 0 and request.num_preemptions:
                raise Violation("stale tree", f"{name} was preempted, its tree is kept")

    def _look_at_lengths(self) -> None:
        """The host counts as computed what is in the cache: nothing drafted, and all but the last token emitted."""
        for request in self.scheduler.running:
            least = 0
            if request.num_output_tokens and not request.is_prefill_chunk and not request.num_preemptions:
                least = request.num_tokens - 1
            if not least <= request.num_computed_tokens <= request.num_tokens - 1:
                raise Violation("length", f"{request.num_computed_tokens} computed of {request.num_tokens} tokens")

    def entry(self, name: str) -> Running:
        """A request under way, by the engine's name for it."""
        return self.running[name]

    def check_hidden(self, names: Sequence[str], hidden: torch.Tensor, roots: torch.Tensor) -> None:
        """The heads get the hidden row that produced the root: for greedy requests it produces it again."""
        plain = [i for i, name in enumerate(names) if set(self.running[name].ask.sampling) <= _SAYS_ARGMAX]
        plain = [i for i in plain if self.running[names[i]].ask.sampling["temperature"] == 0]
        if not plain:
            return
        found = self.trees.runner.model.compute_logits(hidden[plain]).argmax(dim=-1)
        self.totals.hidden_rows += len(plain)
        if not torch.equal(found, roots[plain].to(found.dtype)):
            self.found = self.found or Violation("hidden row", f"{found.tolist()}, roots {roots[plain].tolist()}")

    def _after(self) -> None:
        """When all requests have ended: nothing is left of them but the prefix cache, and that is right."""
        unfinished = [entry.ask.number for entry in self.running.values() if not entry.done]
        if unfinished:
            raise Violation("lost", f"requests {unfinished} never finished")
        runner = self.trees.runner
        if len(runner.book) or self.scheduler._grammar_trees:
            kept = [*runner.book._drafts, *self.scheduler._grammar_trees]
            raise Violation("stale tree", f"{sorted(kept)} are kept")
        if len(runner.drafting.lookups):
            raise Violation("stale text", f"{len(runner.drafting.lookups)} texts are kept")
        if runner.requests or runner.input_batch.num_reqs or self.scheduler.requests:
            raise Violation("left over", f"{sorted(runner.requests)} {sorted(self.scheduler.requests)}")
        self._look_at_heads()
        if self.pool.get_num_free_blocks() != self.free:
            raise Violation("leak", f"{self.free} free blocks before, {self.pool.get_num_free_blocks()} after")
        count, wrong = self.cached.check(None if self.whole_cache else 6)
        self.totals.blocks += count
        if wrong:
            raise Violation("cache", wrong)

    def _look_at_heads(self) -> None:
        """The heads are those of the files, tied to the target as it is."""
        heads = self.trees.runner.drafter._current()
        fresh = load_heads(self.heads)
        fresh.bind(*_matrices(self.trees.runner.model))
        for name, weight in fresh.state_dict().items():
            if not torch.equal(weight, heads.state_dict()[name]):
                raise Violation("heads", f"{name} is not what the file says")
        if not torch.equal(fresh.unembedding_weight(), heads.unembedding_weight()):
            raise Violation("heads", "their rows of the unembedding are not the target's")

    def _recover(self) -> None:
        """Bring the engine back after a violation, or say that it is broken."""
        self.spoilt = True  # perhaps the heads, which a schedule puts to sleep
        self.trees.runner.__dict__.pop("_draft", None)
        try:
            self.engine.abort_request([name for name, entry in self.running.items() if not entry.done], internal=True)
            self.engine.step()
            self.engine.step()
            self.cached.forget()
            left = self.scheduler.requests or self.trees.runner.requests or len(self.trees.runner.book)
            self.broken = bool(left) or self.pool.get_num_free_blocks() != self.free
        except Exception:  # noqa: BLE001 - whatever it was, a new engine has not got it
            self.broken = True

    # What the host does -----------------------------------------------------------------------------------------

    def _watch_scheduler(self) -> None:
        """Count how hostile schedules really are."""
        scheduler, totals = self.scheduler, self.totals
        self.clock = ScriptedClock(0, 10.0, 0.1)

        def schedule(*args: Any, **kwargs: Any) -> Any:
            waiting = {name: list(r.spec_token_ids) for name, r in scheduler.requests.items() if r.spec_token_ids}
            output = type(scheduler).schedule(scheduler, *args, **kwargs)
            self.clock.step_of(output.total_num_scheduled_tokens)
            drafted = sum(map(len, output.scheduled_spec_decode_tokens.values()))
            self.sizes.append((output.total_num_scheduled_tokens, drafted))
            totals.preemptions += len(output.preempted_req_ids or ())
            for name, tokens in output.scheduled_spec_decode_tokens.items():
                totals.padded_drafts += tokens[:1] == [-1]
                totals.cut_drafts += 0 < len(tokens) < len(waiting.get(name, ()))
            totals.skipped_drafts += sum(bool(scheduler.requests[name].spec_token_ids) for name in waiting)
            totals.prompt_pieces += sum(request.is_prefill_chunk for request in scheduler.running)
            return output

        def make_stats(*args: Any, **kwargs: Any) -> Any:
            stats = type(scheduler).make_stats(scheduler, *args, **kwargs)
            drafts = stats.spec_decoding_stats if stats is not None else None
            if drafts is not None:  # counted for the schedule's trees, and shown for the engine's
                drafts.num_accepted_tokens_per_pos += [0] * (MAX_NODES - len(drafts.num_accepted_tokens_per_pos))
                totals.reports += getattr(drafts, "figures", None) is not None
            return stats

        scheduler.schedule, scheduler.make_stats = schedule, make_stats


_SAYS_ARGMAX = {"temperature", "ignore_eos"}


def _key(ask: Ask) -> Any:
    return tuple(ask.prompt), repr(sorted(ask.sampling.items()))


def _params(ask: Ask, tokens: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    fields = dict(ask.sampling)
    if "grammar" in fields:
        fields["structured_outputs"] = StructuredOutputsParams(**fields.pop("grammar"))
    least = min(fields.pop("min_tokens", 0), tokens)
    return SamplingParams(max_tokens=tokens, min_tokens=least, **fields)


def start_worlds(folder: Path, names: Sequence[str] = ()) -> dict[str, World]:
    """A world for each model, which are saved in `folder`; without `names` for all that a run takes.

    MEDUSA_LONG=1: more kinds of models, and every cached block is recomputed.
    """
    is_long = bool(os.environ.get("MEDUSA_LONG"))
    names = names or (*MODELS, *(MORE if is_long else ()))
    return {name: World(name, *save(name, folder), whole_cache=is_long) for name in names}


def drawn(worlds: dict[str, World], seeds: Sequence[int]) -> list[Schedule]:
    """The schedules of some seeds, with plain decoding asked for many requests at once."""
    wanted: dict[str, list[Ask]] = {name: [] for name in worlds}

    def note(model: str, ask: Ask) -> list[int]:
        wanted[model].append(ask)
        return [EOS]

    for seed in seeds:
        draw(seed, list(worlds), note)
    for name, world in worlds.items():
        world.ask_plain(wanted[name])
    schedules = [draw(seed, list(worlds), lambda model, ask: worlds[model].answer(ask)) for seed in seeds]
    for name, world in worlds.items():
        world.ask_plain([ask for schedule in schedules if schedule.model == name for ask in schedule.asks])
    return schedules
