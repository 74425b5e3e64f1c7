"""Model Runner V2 with trees: propose, forward, walk, commit, all on the device."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.gpu import model_runner as host

from vllm_medusa.config import rank_accuracy_of
from vllm_medusa.host.guard import AcceptanceGuard
from vllm_medusa.host.metrics.figures import FIGURES, SEND_SECONDS, Counts, Figures
from vllm_medusa.host.ranks import is_first_rank
from vllm_medusa.host.scheduler import WIDTHS
from vllm_medusa.host.startup import log_choices, logger, time_heads, time_steps
from vllm_medusa.host.statistics import Statistics
from vllm_medusa.host.target import part_of
from vllm_medusa.host.v2.clock import StageClock
from vllm_medusa.host.v2.counting import DeviceCounts
from vllm_medusa.host.v2.device_cache import DeviceTreeCache
from vllm_medusa.host.v2.draft_tokens import TreeDraftTokensHandler
from vllm_medusa.host.v2.learning import Learning, StepSize
from vllm_medusa.host.v2.model_state import with_trees
from vllm_medusa.host.v2.slots import SlotTrees
from vllm_medusa.host.v2.speculator import MedusaSpeculator
from vllm_medusa.kept import Kept
from vllm_medusa.proposer import MedusaProposer
from vllm_medusa.tree.growth import grow_static
from vllm_medusa.tree.tensor_lookup import DEEPEST, TensorLookups
from vllm_medusa.widths import first_ranges


class MedusaModelRunnerV2(host.GPUModelRunner):
    """The host's runner with our model state (`model_state.py`), sampler (`sampling.py`) and drafter (`speculator.py`).

    The host calls these three in each step.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        """Build the host's runner, then put our drafter where it built the one that `method` names."""
        super().__init__(vllm_config, device)
        self.drafter = MedusaProposer(vllm_config)
        self.drafter.part_of = part_of
        self.trees = SlotTrees(self.req_states, self.num_speculative_steps, device)
        self.clock: StageClock[StepSize] = StageClock(device)
        fp64_noise = self.model_config.use_fp64_gumbel
        self.speculator = MedusaSpeculator(self.drafter, self.trees, self.clock, fp64_noise=fp64_noise)
        self.draft_tokens_handler = TreeDraftTokensHandler(device, self.trees)
        self.learning = Learning()
        self._widths_sent: list[int] | None = None
        self._figures_due = 0.0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Let the host build the model's state by the name it uses, with our subclass under that name while it does."""
        build = host.init_model_state
        guard = AcceptanceGuard(self.drafter.settings.heads, logger)
        guard.judged = not is_first_rank()

        def init_model_state(vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> Any:
            state = build(vllm_config, model, encoder_cache, device)
            built: Any = type(state)
            state.__class__ = with_trees(built)
            self.drafter.load_model(model)
            self._set_up_trees()
            state.trees, state.clock = self.trees, self.clock
            self.counts = DeviceCounts(self.trees, guard, self.learning, self.drafter.top_k, device)
            return state

        host.init_model_state = init_model_state
        try:
            super().load_model(*args, **kwargs)
        finally:
            host.init_model_state = build

    def _dummy_sampler_run(self, hidden_states: Tensor) -> None:
        """The host measures memory with a row of logits for each request; steps of trees have more."""
        super()._dummy_sampler_run(hidden_states)
        settings = self.drafter.settings
        nodes, requests = settings.num_speculative_tokens, self.max_num_reqs
        most = requests * (1 + nodes)
        if settings.adaptive:
            most = max(2 * requests, *(last * (1 + width) for _, last, width in first_ranges(nodes)))
        rows = min(most, self.max_num_tokens)
        self.model.compute_logits(hidden_states[:1].expand(rows, -1).contiguous()).float().argmax(dim=-1)

    def _set_up_trees(self) -> None:
        """Once the heads are known: how deep trees get, with the texts of requests or without."""
        settings, trees = self.drafter.settings, self.trees
        trees.max_depth = self.drafter.max_depth
        if settings.prompt_lookup:
            most = min(DEEPEST, settings.num_speculative_tokens)
            trees.max_depth = max(trees.max_depth, most)
            trees.lookups = TensorLookups(self.max_num_reqs, most, self.device)

    def measure_step_cost(self, kept: Kept) -> None:
        """Warm-up is over: count from now on, time steps and heads, and choose from that how many nodes to draft."""
        self.model_state.counts = self.counts
        settings, heads = self.drafter.settings, self.drafter.heads
        if not settings.adaptive:
            return
        assert heads is not None
        nodes = settings.num_speculative_tokens
        for tokens, seconds in time_steps(self, min(self.max_num_tokens, self.max_num_reqs * (1 + nodes)), kept):
            self.learning.cost.seed(tokens, seconds)

        def draft(hidden: Tensor, roots: Tensor) -> Tensor:
            expected = self.trees.expected(torch.arange(len(roots), device=roots.device), self.max_model_len)
            return self.drafter.propose_tensors(hidden, roots, expected).tokens

        for requests, seconds in time_heads(self.drafter, draft, self.max_num_reqs):
            self.learning.heads_cost.seed(requests, seconds)
        accuracy = rank_accuracy_of(heads.config)
        reach = (self.drafter.fixed_tree or grow_static(accuracy, nodes)).reach(accuracy)
        self.learning.choose_from(reach, nodes, self.max_num_reqs)

    def warm_up_trees(self) -> None:
        """Compile kernels of ours before the host captures its graphs and forbids to compile."""
        cache = self.model_state.tree_cache
        if isinstance(cache, DeviceTreeCache):
            logger.info("Medusa: compiling kernels for trees of up to %d nodes.", self.trees.num_nodes)
            cache.warm_up(self.trees.num_nodes)

    def get_draft_model(self) -> Any:
        """The heads, whose weights the host keeps or exchanges as a draft model's."""
        return self.drafter.heads

    def load_heads_again(self) -> None:
        """The engine wakes up without weights: the heads are read from their files, and what lay beside them is new."""
        self.drafter.load_again()
        self._set_up_trees()
        self.counts.forget()

    def log_choices(self, products: str | None = None) -> None:
        """One line that says what serves; `products`: what multiplies with the target's matrices."""
        log_choices(self.drafter, "Model Runner V2", self.model_state.tree_cache.kernel, "vLLM's sampler", products)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """The host's first half of a step, whose plan tells what became of steps before."""
        self.counts.plan(scheduler_output)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """The host's second half of a step; beside its tokens the engine core gets what it should know."""
        output = super().sample_tokens(*args, **kwargs)
        if isinstance(output, host.AsyncOutput) and self.model_state.counts is not None:
            self._learn()
            self._tell(output.model_runner_output)
        return output

    def _learn(self) -> None:
        """Note the step's end, and learn from the seconds of steps that are through by now."""
        batch = self.model_state.batch
        self.clock.end(None if batch.has_prefill else _size_of(batch))
        for size, seconds in self.clock.finished():
            self.counts.add_seconds(seconds)
            self.learning.learn_step(size, seconds)

    def _tell(self, output: Any) -> None:
        """Now and then an output brings figures of steps before it, and how many nodes pay by them."""
        now = time.monotonic()
        if now >= self._figures_due:
            self._figures_due = now + SEND_SECONDS
            self.counts.collect()  # copied since the last time: nothing to wait for
            self.counts.fetch()
            unsent, self.counts.unsent = self.counts.unsent, Counts()
            if unsent.steps:
                setattr(output, FIGURES, Figures(unsent, self.learning.learnt()))
            self.learning.choose()
        elif not self.learning.ends_try():
            return
        if self.learning.widths != self._widths_sent:
            self._widths_sent = self.learning.widths
            setattr(output, WIDTHS, self._widths_sent)

    def medusa_report(self, reset: bool = False) -> dict[str, Any]:
        """Totals since the last reset (see `Statistics.report`), and what is learnt. This waits for the device.

        `cost`: step times by tokens, without the heads; `heads_cost`: times of drafting by requests; `trust`: the share
        of promised tokens that came true; `widths`: nodes by requests; `lookup_odds`: how often a match of 1, 2, ...
        tokens goes on.
        """
        report = Statistics(totals=self.counts.report()).report()
        if reset:
            self.counts.reset()
        return report | {
            "kernel": self.model_state.tree_cache.kernel,
            "candidates": self.drafter.top_k,
            "cost": self.learning.cost.table(),
            "heads_cost": self.learning.heads_cost.table(),
            "trust": round(self.learning.trust.share, 4),
            "widths": self.learning.widths,
            "lookup_odds": self.trees.lookups.odds() if self.trees.lookups is not None else [],
        }


def _size_of(batch: Any) -> StepSize:
    """Of a step that only decodes, by what the host knows without waiting: contexts are upper bounds."""
    count = batch.num_reqs
    context = batch.seq_lens_cpu_upper_bound.numpy()[:count] - batch.num_scheduled_tokens[:count]
    nodes = batch.num_scheduled_tokens[:count] - 1
    return StepSize(batch.num_tokens, count, float(context.sum()), float((context * nodes).sum()))


class MedusaCPUModelRunnerV2(MedusaModelRunnerV2, CPUModelRunner):
    """The same over the host's runner for CPUs."""
