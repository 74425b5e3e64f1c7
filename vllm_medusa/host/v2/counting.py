"""Figures of decode steps on Model Runner V2: added up on the device, and copied to the host now and then."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.v1.worker.gpu.async_utils import async_copy_to_np

from vllm_medusa.host.guard import AcceptanceGuard
from vllm_medusa.host.metrics.cuts import CUTS, CountedSteps
from vllm_medusa.host.metrics.figures import Counts, batch_label
from vllm_medusa.host.v2.learning import Learning
from vllm_medusa.host.v2.slots import SlotTrees, StepTrees

LABELS = 32  # powers of two, more than there are requests in a batch


class DeviceCounts:
    """Counts of walks. What a walk brought behind a request's end is counted first, and taken out once the engine core
    has told of it (`plan`); but by rank, which only the device knows, it stays.

    Attributes:
        totals: what has been copied since the last reset.
        unsent: what of it the engine core has not been told.
    """

    def __init__(
        self, trees: SlotTrees, guard: AcceptanceGuard, learning: Learning, top_k: int, device: torch.device
    ) -> None:
        """Count walks of `trees` with `top_k` candidates a head; tell `guard` and `learning` what comes of them."""
        self._trees, self._guard, self._learning, self._top_k, self._device = trees, guard, learning, top_k, device
        nodes = trees.num_nodes
        sizes = {"emitted": 1, "requests": 1, "promised": 1, "nodes": LABELS, "by_depth": nodes, "checked": nodes}
        sizes |= {"reached": nodes + 1}  # by node; none
        sizes |= {"drafted": top_k + 2, "accepted": top_k + 2}  # by rank; what a text alone expected; no node
        self._names = list(sizes)
        self._ends = np.cumsum(list(sizes.values()))[:-1].tolist()
        self._sums = torch.zeros(sum(sizes.values()), dtype=torch.float64, device=device)  # exact up to 2^53
        self._parts = dict(zip(self._names, self._sums.tensor_split(self._ends), strict=True))
        self._known = Counts()  # of the counts in `_sums`, what the host knows itself
        self._copied: tuple[npt.NDArray[np.float64], Counts] | None = None
        self._stream = torch.cuda.Stream(device)
        self._event = torch.cuda.Event(blocking=True)
        self.totals, self.unsent = Counts(), Counts()
        self._steps = CountedSteps()
        self._wrong, self._wrong_unsent = Counts(), Counts()  # still in `totals` and in `unsent`, or on their way there

    def plan(self, plan: Any) -> None:
        """A step begins; its plan tells what walks before it brought for nothing."""
        self._steps.now, cuts = getattr(plan, CUTS, (None, ()))
        if cuts:
            ever, since = self._steps.wrong(cuts)
            self._wrong.add(since)
            self._wrong_unsent.add(ever)

    def reset(self) -> None:
        """Begin anew, after what was counted so far has been told."""
        self._read()
        self.totals, self._wrong = Counts(), Counts()
        self._steps.start_anew()

    def forget(self) -> None:
        """What was counted on the device is lost."""
        self._sums.zero_()
        self._known, self._copied = Counts(), None

    def count(self, batch: Any, step: StepTrees | None) -> None:
        """Count one step of the host's `batch`, with or without trees; nothing waits for the device."""
        decoding = int((~batch.is_prefilling_np).sum())
        if not decoding:
            return
        label, parts = batch_label(decoding), self._parts
        self._known.add(Counts(steps={label: 1}, request_steps={label: decoding}, emitted_tokens=decoding))
        self._steps.note(label, (batch.req_ids[row] for row in np.flatnonzero(~batch.is_prefilling_np)))
        if step is None or step.walk is None:
            return
        path = step.walk.rows[:, 1:]
        accepted = path >= 0
        parts["emitted"] += accepted.sum()
        parts["requests"] += (step.num_nodes > 0).sum()
        parts["nodes"][label.bit_length() - 1] += step.num_nodes.sum()
        parts["by_depth"][: path.shape[1]] += accepted.sum(dim=0)
        is_node, reach = step.parents >= 0, self._trees.reach[batch.idx_mapping, : step.width]
        parts["promised"] += reach.where(is_node, 0.0).sum()
        parts["checked"][: step.width] += (torch.arange(step.width, device=path.device) < step.num_nodes[:, None]).sum(
            0
        )
        self._add("reached", (path - 1).where(accepted, -1))
        ranks = self._trees.ranks[batch.idx_mapping, : step.width]
        self._add("drafted", ranks.where(is_node, -1))
        self._add("accepted", ranks.gather(1, (path - 1).clamp(min=0)).where(accepted, -1))

    def add_seconds(self, seconds: dict[str, float]) -> None:
        """Seconds by stage of a step that was counted."""
        for counts in (self.totals, self.unsent):
            counts.add(Counts(seconds=seconds))

    def fetch(self) -> None:
        """Begin to copy what was counted since the last time, on a stream of its own; `collect` has it later."""
        sums, known = self._sums.clone(), self._known
        self._sums.zero_()
        self._known = Counts()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._copied = async_copy_to_np(sums), known
            sums.record_stream(self._stream)  # not to be used anew before it is copied
            self._event.record()

    def collect(self) -> None:
        """Add up what was fetched, waiting for that copy alone."""
        if self._copied is None:
            return self._correct()
        self._event.synchronize()
        (sums, counts), self._copied = self._copied, None
        parts = dict(zip(self._names, np.split(sums, self._ends), strict=True))
        read = {name: part.astype(np.int64).tolist() for name, part in parts.items()}
        counts.add(
            Counts(
                drafted_nodes={label: read["nodes"][label.bit_length() - 1] for label in counts.steps},
                emitted_tokens=read["emitted"][0],
                accepted_by_depth=read["by_depth"],
                drafted_by_rank=read["drafted"][:-1],
                accepted_by_rank=read["accepted"][:-1],
                candidates=self._top_k,
            )
        )
        self._guard.watch(read["requests"][0], read["by_depth"][0])
        self._learning.learn_walks(float(parts["promised"][0]), read["reached"][:-1], read["checked"])
        self.totals.add(counts)
        self.unsent.add(counts)
        self._correct()

    def _correct(self) -> None:
        self._wrong = self.totals.take_off(self._wrong)
        self._wrong_unsent = self.unsent.take_off(self._wrong_unsent)

    def report(self) -> Counts:
        """Everything since the last reset; this waits for the device."""
        self._read()
        return self.totals

    def _read(self) -> None:
        self.collect()
        self.fetch()
        self.collect()

    def _add(self, name: str, places: Tensor) -> None:
        """Count places; those below 0 in the last one, which nobody reads."""
        part = self._parts[name]
        places = places.where(places >= 0, len(part) - 1).flatten()
        part.scatter_add_(0, places, torch.ones_like(places, dtype=part.dtype))
