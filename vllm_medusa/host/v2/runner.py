"""Model Runner V2 with trees: propose, forward, walk, commit, all on the device."""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.gpu import model_runner as host

from vllm_medusa.attention.cpu import active_kernel
from vllm_medusa.config import rank_accuracy_of
from vllm_medusa.cost import StepCost
from vllm_medusa.host.guard import AcceptanceGuard
from vllm_medusa.host.metrics.figures import FIGURES, SEND_SECONDS, Counts, Figures, Learnt
from vllm_medusa.host.ranks import is_first_rank
from vllm_medusa.host.scheduler import WIDTHS
from vllm_medusa.host.startup import log_choices, logger, time_heads, time_steps
from vllm_medusa.host.statistics import Statistics
from vllm_medusa.host.target import part_of
from vllm_medusa.host.v2.counting import DeviceCounts
from vllm_medusa.host.v2.draft_tokens import TreeDraftTokensHandler
from vllm_medusa.host.v2.model_state import with_trees
from vllm_medusa.host.v2.slots import SlotTrees
from vllm_medusa.host.v2.speculator import MedusaSpeculator
from vllm_medusa.proposer import MedusaProposer
from vllm_medusa.tree.growth import grow_static
from vllm_medusa.widths import best_widths, width_grid


class MedusaModelRunnerV2(CPUModelRunner):
    """The host's runner with our model state (`model_state.py`), sampler (`sampling.py`) and drafter (`speculator.py`).

    The host calls these three in each step.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        """Build the host's runner, then put our drafter where it built the one that `method` names."""
        super().__init__(vllm_config, device)
        self.drafter = MedusaProposer(vllm_config)
        self.drafter.part_of = part_of
        self.trees = SlotTrees(self.req_states, self.num_speculative_steps, device)
        self.speculator = MedusaSpeculator(self.drafter, self.trees)
        self.draft_tokens_handler = TreeDraftTokensHandler(device, self.trees)
        self.cost, self.heads_cost = StepCost(), StepCost()
        self.widths: list[int] | None = None  # nodes by number of requests, where they depend on it
        self._widths_sent = False
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
            self.trees.max_depth = self.drafter.max_depth
            state.trees = self.trees
            state.counts = self.counts = DeviceCounts(self.trees, guard, self.drafter.top_k, device)
            return state

        host.init_model_state = init_model_state
        try:
            super().load_model(*args, **kwargs)
        finally:
            host.init_model_state = build

    def measure_step_cost(self) -> None:
        """Time steps and heads, and choose from that how many nodes are drafted for how many requests."""
        settings, heads = self.drafter.settings, self.drafter.heads
        if not settings.adaptive:
            return
        assert heads is not None
        nodes = settings.num_speculative_tokens
        for tokens, seconds in time_steps(self, min(self.max_num_tokens, self.max_num_reqs * (1 + nodes))):
            self.cost.seed(tokens, seconds)
        for requests, seconds in time_heads(self.drafter, self.drafter.propose_tensors, self.max_num_reqs):
            self.heads_cost.seed(requests, seconds)
        accuracy = rank_accuracy_of(heads.config)
        reach = (self.drafter.fixed_tree or grow_static(accuracy, nodes)).reach(accuracy)
        self.widths = best_widths(self.cost, self.heads_cost, reach, width_grid(nodes), self.max_num_reqs)

    def log_choices(self) -> None:
        """One line that says what serves."""
        log_choices(self.drafter, "Model Runner V2", active_kernel(), "the host's sampler on the device")

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """The host's second half of a step; beside its tokens the engine core gets what it should know."""
        output = super().sample_tokens(*args, **kwargs)
        if isinstance(output, host.AsyncOutput):
            self._tell(output.model_runner_output)
        return output

    def _tell(self, output: Any) -> None:
        """The first step's output brings what was measured; now and then one brings figures of steps before it."""
        if self.widths is not None and not self._widths_sent:
            setattr(output, WIDTHS, self.widths)
            self._widths_sent = True
        now = time.monotonic()
        if now < self._figures_due:
            return
        self._figures_due = now + SEND_SECONDS
        self.counts.collect()  # copied since the last time: nothing to wait for
        self.counts.fetch()
        unsent, self.counts.unsent = self.counts.unsent, Counts()
        if unsent.steps:
            learnt = Learnt(step_seconds=self.cost.by_size(), heads_seconds=self.heads_cost.by_size())
            setattr(output, FIGURES, Figures(unsent, learnt))

    def medusa_report(self, reset: bool = False) -> dict[str, Any]:
        """Totals since the last reset (see `Statistics.report`; no times: nothing waits for the device), and costs.

        `cost`: seconds of steps by tokens, `heads_cost`: of the heads by requests, `widths`: nodes by requests, all as
        measured before serving.
        """
        report = Statistics(totals=self.counts.report()).report()
        if reset:
            self.counts.reset()
        return report | {
            "kernel": active_kernel(),
            "candidates": self.drafter.top_k,
            "cost": self.cost.table(),
            "heads_cost": self.heads_cost.table(),
            "widths": self.widths,
        }
