"""Our metrics and vLLM's own about drafts: counted by hand on planted trees, and against each other."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import MAX_LEN, VOCAB, Engine, Oracle, random_prompts, random_tree, start
from metric_samples import exposed, samples

from vllm_medusa.host import scheduler
from vllm_medusa.host.metrics.figures import RECENT, SEND_SECONDS, Counts, Figures, Learnt, Outbox
from vllm_medusa.host.metrics.stats import leave_out
from vllm_medusa.proposer import TreeDraft

pytestmark = pytest.mark.slow
NODES = 16


@dataclass
class Script:
    """Drafts by hand: for each prompt, one (tokens, parents, ranks) per draft, then none."""

    engine: Engine
    lines: dict[tuple[int, ...], list[tuple[list[int], list[int], list[int]]]] = field(default_factory=dict)

    def __call__(self, rows: list[int], hidden: torch.Tensor, roots: torch.Tensor) -> TreeDraft:
        """Stand in for the runner's `_draft`."""
        tokens, parents, ranks = np.full((3, len(rows), NODES), -1)
        sizes = np.zeros(len(rows), dtype=np.int64)
        for place, row in enumerate(rows):
            request = self.engine.runner.requests[self.engine.runner.input_batch.req_ids[row]]
            left = self.lines[tuple(request.prompt_token_ids)]
            if left:
                n = sizes[place] = len(left[0][0])
                for target, values in zip((tokens, parents, ranks), left.pop(0), strict=True):
                    target[place, :n] = values
        return TreeDraft(tokens, parents, ranks, np.full(tokens.shape, 0.5, dtype=np.float32), sizes)


@pytest.fixture(scope="module")
def served(tiny_model: Path, tiny_heads: Path) -> Engine:
    """Trees with the host's statistics switched on."""
    medusa = {"num_speculative_tokens": NODES, "adaptive": False}
    options = {"max_model_len": MAX_LEN, "block_size": 32, "disable_log_stats": False}
    options["per_request_spec_decode_metrics"] = "detailed"
    return start(tiny_model, tiny_heads, medusa=medusa, **options)


@pytest.fixture
def figures(served: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """The same, all metrics at 0."""
    from vllm.v1.metrics.loggers import StatLoggerManager

    engine, host_logger = served.llm.llm_engine, logging.getLogger("vllm")
    level = host_logger.level
    host_logger.setLevel(logging.INFO)  # else the host builds no log line: other tests may have quieted it
    engine.logger_manager = StatLoggerManager(engine.vllm_config)
    host_logger.setLevel(level)
    served.runner.medusa_report(reset=True)
    served.runner._learnt_due = 0.0
    yield served
    served.runner.__dict__.pop("_draft", None)


def planted(figures: Engine, tiny: Engine) -> list[Any]:
    """The answers of two requests whose five steps together the tests below have counted; the first one ends inside its
    last path."""
    from vllm import SamplingParams

    prompts = random_prompts(np.random.default_rng(8), [7, 12])
    truth = tiny.tokens(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    t, u = truth
    assert t[7] not in t[:7], "another seed: the end must come where the script has it"
    junk = [next(token for token in range(2, VOCAB - 1) if token != place) for place in t]
    text = figures.runner.drafter.top_k
    script = Script(figures)
    script.lines[tuple(prompts[0])] = [
        ([junk[1], t[1], t[2], junk[3]], [0, 0, 2, 3], [0, 1, 0, 2]),  # accepts nodes 2 and 3: 3 tokens
        ([junk[4], junk[4] + 1 if junk[4] + 1 != t[4] else junk[4] + 2], [0, 0], [0, 1]),  # accepts none: 1 token
        ([], [], []),  # 1 token
        ([t[6], t[7], t[8], t[9]], [0, 1, 2, 3], [0, text, 0, 1]),  # accepts all four, the request ends at the second
    ]
    script.lines[tuple(prompts[1])] = [([u[1]], [0], [0])]  # accepts one, then four steps without drafts
    figures.runner._draft = script
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=[t[7]]),
        SamplingParams(temperature=0, max_tokens=7, ignore_eos=True),
    ]
    answers = figures.answer(prompts, params)
    assert [list(answer.token_ids) for answer in answers] == [t[:8], u[:7]]
    return answers


def test_counted_by_hand(figures: Engine, tiny: Engine) -> None:
    """Requests of 8 and 7 tokens; the first token of each comes from its prompt's step and is not counted."""
    planted(figures, tiny)
    text = exposed()

    def ours(name: str) -> dict[str, float]:
        return samples(text, f"vllm_medusa:{name}")

    assert ours("steps_total") == {"2": 4, "1": 1}
    assert ours("request_steps_total") == {"2": 8, "1": 1}
    assert ours("drafted_nodes_total") == {"2": 4 + 2 + 0 + 4 + 1}
    assert ours("emitted_tokens_total") == {"": (3 + 1 + 1 + 2) + (2 + 1 + 1 + 1 + 1)}
    assert ours("wasted_nodes_total") == {"": 2 + 2 + 2}
    assert ours("accepted_nodes_by_depth_total") == {"1": 3, "2": 2}
    assert ours("drafted_nodes_by_rank_total") == {"1": 2 + 1 + 2 + 1, "2": 1 + 1 + 1, "3": 1, "text": 1}
    assert ours("accepted_nodes_by_rank_total") == {"1": 1 + 1 + 1, "2": 1, "text": 1}
    assert ours("mean_accepted_length") == {"": pytest.approx(13 / 9)}
    seconds = ours("stage_seconds_total")
    assert set(seconds) == {"forward", "walk", "commit", "propose", "host"}
    overhead = sum(seconds[stage] for stage in ("walk", "commit", "propose")) / sum(seconds.values())
    assert ours("overhead_ratio")[""] == pytest.approx(overhead)
    trust = figures.runner.drafting.trusts.every.share
    assert ours("trust_ratio")[""] > 0 and 0 < trust < 1.25
    assert ours("step_cost_seconds").keys() <= {str(size) for size in figures.runner.drafting.cost.cells}

    def hosts(name: str) -> dict[str, float]:
        return samples(text, f"vllm:spec_decode_{name}_total")

    assert samples(text, "vllm:generation_tokens_total") == {"": 8 + 7}
    assert hosts("num_drafts") == {"": 3 + 1}
    assert hosts("num_draft_tokens") == {"": 4 + 2 + 4 + 1}
    assert hosts("num_accepted_tokens") == {"": 2 + 0 + 2 + 1}
    assert hosts("num_accepted_tokens_per_pos") == {"0": 3, "1": 2}


def test_each_request_is_told_what_it_got(figures: Engine, tiny: Engine) -> None:
    """The first request's last path has four accepted nodes, and the request ends at the second."""
    first, second = planted(figures, tiny)
    assert first.spec_decode_metrics.per_step_accepted == [2, 0, 2]
    assert first.spec_decode_metrics.per_step_drafted == [4, 2, 4]
    assert first.spec_decode_metrics.histogram == [1, 0, 2, *[0] * (NODES - 2)]
    assert second.spec_decode_metrics.histogram == [0, 1, *[0] * (NODES - 1)]


def test_the_report_says_the_same(figures: Engine, tiny: Engine) -> None:
    planted(figures, tiny)
    report = figures.runner.medusa_report()
    assert (report["steps"], report["request_steps"], report["drafted_nodes"]) == (5, 9, 11)
    assert report["emitted_tokens"] == 13
    assert report["accepted_by_depth"] == [3, 2]
    assert report["by_batch_size"]["request_steps"] == {2: 8, 1: 1}
    assert [example["emitted"] for example in report["examples"]][-1] == report["examples"][-1]["tokens"][:2]


def test_log_line(figures: Engine, tiny: Engine) -> None:
    """The host's line, then ours, of the period since the last ones; nothing when nothing was decoded."""
    from vllm import SamplingParams

    planted(figures, tiny)
    (adapter,) = [
        found.per_engine_stat_loggers[0]
        for found in figures.llm.llm_engine.logger_manager.stat_loggers
        if hasattr(found, "per_engine_stat_loggers")
    ]
    lines: list[str] = []

    def keep(message: str, *values: Any) -> None:
        lines.append(message % values)

    adapter.spec_decoding_logging.log(log_fn=keep)
    hosts, ours = lines
    assert hosts.startswith("SpecDecoding metrics: Mean acceptance length: 2.25,")
    assert ours.startswith("Medusa metrics: Mean accepted length: 1.44, Drafted: 11 nodes, Wasted: 6 nodes (54.5%), ")
    assert "Nodes per request by batch size: {1: 0.0, 2: 1.4}" in ours
    assert "Acceptance by depth: 0.333, 0.222, " in ours
    assert "Acceptance by rank: {1: 0.500, 2: 0.333, 3: 0.000, text: 1.000}" in ours
    assert "Promises kept: " in ours and "Milliseconds by tokens in a step: {" in ours
    adapter.spec_decoding_logging.log(log_fn=keep)
    assert len(lines) == 2
    figures.tokens(
        random_prompts(np.random.default_rng(8), [7]), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    )
    adapter.spec_decoding_logging.log(log_fn=keep)
    assert len(lines) == 3 and lines[2].startswith("Medusa metrics: Mean accepted length: 1.00, Drafted: 0 nodes, ")
    adapter.spec_decoding_logging.log(log_fn=keep)
    assert len(lines) == 3, "a period without drafts is told once, too"


def test_every_end_of_a_request(figures: Engine, tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that end by EOS, stop token, length, model length and repetition, most inside a path: ours against what
    the host handed out, and against its own counts."""
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams

    rng = np.random.default_rng(5)
    prompts = random_prompts(rng, [9] * 40 + [MAX_LEN - 20] * 6)
    repeating = RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=1, min_count=2)
    kinds = [
        {"logit_bias": {VOCAB - 1: 9.0}},
        {"ignore_eos": True, "stop_token_ids": list(range(0, VOCAB, 6))},
        {"ignore_eos": True, "min_tokens": 12, "stop_token_ids": list(range(0, VOCAB, 4))},
        {"ignore_eos": True, "repetition_detection": repeating, "logit_bias": {7: 40.0, 8: 40.0}},
    ]
    params = [
        SamplingParams(temperature=0, max_tokens=int(rng.integers(13, 40)), **kinds[place % 4])
        for place in range(len(prompts))
    ]
    truth = tiny.tokens(prompts, params)
    asked = zip(prompts, truth, params, strict=True)
    answers = {tuple(prompt): tokens + beyond(tiny, prompt + tokens, own) for prompt, tokens, own in asked}
    cut: list[int] = []
    monkeypatch.setattr(scheduler, "leave_out", lambda *figures: (cut.append(1), leave_out(*figures)))
    figures.runner._draft = Oracle(figures, answers, lambda r: random_tree(r, NODES), rng, misses=0.1)
    assert figures.tokens(prompts, params) == truth
    assert len(cut) > len(prompts) / 3, "many requests end inside a path"
    text = exposed()
    emitted = sum(map(len, truth)) - len(prompts)
    assert samples(text, "vllm_medusa:emitted_tokens_total") == {"": emitted}
    assert figures.runner.medusa_report()["emitted_tokens"] == emitted
    drafted = samples(text, "vllm_medusa:drafted_nodes_total")
    assert {"": sum(drafted.values())} == samples(text, "vllm:spec_decode_num_draft_tokens_total")
    depths = samples(text, "vllm_medusa:accepted_nodes_by_depth_total")
    positions = samples(text, "vllm:spec_decode_num_accepted_tokens_per_pos_total")
    assert depths == {str(int(position) + 1): value for position, value in positions.items()}
    accepted = samples(text, "vllm:spec_decode_num_accepted_tokens_total")
    assert {"": sum(depths.values())} == accepted and accepted[""] > 0.4 * emitted
    assert samples(text, "vllm_medusa:wasted_nodes_total") == {"": sum(drafted.values()) - accepted[""]}
    by_rank = samples(text, "vllm_medusa:accepted_nodes_by_rank_total")
    assert sum(by_rank.values()) == accepted[""]


def beyond(tiny: Engine, text: list[int], params: Any) -> list[int]:
    """What the model would say behind the end of a request: a walk goes on there if drafts do."""
    from vllm import SamplingParams

    if len(text) >= MAX_LEN:
        return []
    more = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logit_bias=params.logit_bias)
    return tiny.tokens([text], more)[0]


def test_times_are_of_steps_that_only_decode(figures: Engine) -> None:
    """A step that also computes a prompt counts as a step, and its time as nothing."""
    from vllm import SamplingParams

    engine, params = figures.llm.llm_engine, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def decode(prompt: list[int] | None = None) -> tuple[int, dict[str, float]]:
        if prompt:
            engine.add_request(f"request-{len(prompt)}", {"prompt_token_ids": prompt}, params)
        engine.step()
        report = figures.runner.medusa_report()
        return report["request_steps"], report["seconds"]

    assert decode([5, 6, 7]) == (0, dict.fromkeys(("forward", "walk", "commit", "propose", "step"), 0.0))
    requests, seconds = decode()
    stages = [seconds[stage] for stage in ("forward", "walk", "propose")]
    assert requests == 1 and min(stages) > 0 and seconds["step"] > sum(stages) + seconds["commit"]
    assert decode([8, 9]) == (2, seconds)
    assert decode()[1]["step"] > seconds["step"]
    while engine.has_unfinished_requests():
        engine.step()


def test_switched_off_nothing_is_gathered(tiny_medusa: Engine) -> None:
    """As by `--disable-log-stats`."""
    from vllm import SamplingParams

    tiny_medusa.tokens([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    scheduler = tiny_medusa.llm.llm_engine.engine_core.engine_core.scheduler
    assert not scheduler.log_stats
    assert scheduler._outbox.take(0.0, idle=True) is None


def step(tokens: int = 3, learnt: Learnt | None = None) -> Figures:
    return Figures(Counts(steps={1: 1}, request_steps={1: 1}, emitted_tokens=tokens), learnt)


def test_reports_are_sent_now_and_then_and_at_the_end() -> None:
    outbox, sent = Outbox(), []
    for number in range(100):  # a step takes 10 ms
        outbox.put(step(learnt=Learnt(trust=number)))
        sent.append(outbox.take(10.0 + number / 100, idle=number == 99))
    reports = [report for report in sent if report is not None]
    assert sent[0] is not None and sent[-1] is not None and sent[98] is None
    assert len(reports) == 1 / SEND_SECONDS + 1
    assert sum(report.counts.emitted_tokens for report in reports) == 300, "each step is in one report"
    assert [report.learnt.trust for report in reports if report.learnt] == [0, 25, 50, 75, 99]
    assert outbox.take(99.0, idle=True) is None


def test_recent_figures_forget() -> None:
    outbox, now, last = Outbox(), 0.0, None
    for tokens in [1] * 100 + [4] * RECENT:
        outbox.put(step(tokens))
        last = outbox.take(now, idle=True)
        now += 1
    assert last is not None and last.mean_accepted_length == 4.0


def test_figures_survive_the_way_to_a_front_end() -> None:
    """Through the host's encoder and a decoder of the type that front ends use."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    from vllm_medusa.host.metrics.stats import MedusaStats, with_figures
    from vllm_medusa.plugin import register

    register()
    counts = Counts({4: 1}, {4: 3}, {4: 9}, 5, [1, 1], [6, 3], [2], 10, {"step": 0.5})
    figures = Figures(counts, Learnt(0.75, {8: 0.25}, {3: 0.125}), 1.5, 0.25)

    def sent(stats: SpecDecodingStats) -> Any:
        outputs = EngineCoreOutputs(scheduler_stats=SchedulerStats(spec_decoding_stats=stats))
        read = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs))
        return read.scheduler_stats.spec_decoding_stats

    hosts = SpecDecodingStats.new(4)
    hosts.observe_draft(4, 2)
    assert sent(with_figures(hosts, figures, 4)) == with_figures(hosts, figures, 4)
    assert sent(with_figures(None, figures, 4)).num_accepted_tokens_per_pos == [0] * 4
    plain = sent(hosts)
    assert isinstance(plain, MedusaStats) and plain.figures is None and plain.num_accepted_tokens == 2


FRONT_ENDS = """
import os
from types import SimpleNamespace
from vllm_medusa.host.choice import PROPOSER
from vllm_medusa.host.metrics.figures import Counts, Figures, Learnt
from vllm_medusa.host.metrics.prometheus import MedusaProm
from vllm_medusa.host.metrics.stats import with_figures
ours = SimpleNamespace(method="custom_class", model=PROPOSER, num_speculative_tokens=4)
for trust in (0.5, 0.25):  # a front end each
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        continue
    prom = MedusaProm(ours, ["model_name", "engine"], {0: ["tiny", "0"], 1: ["tiny", "1"]})
    for engine in (0, 1):
        counts = Counts({1: 1}, {1: 1}, {1: 4}, 3 + engine, [1, 1], [2, 2], [2], 2)
        prom.observe(with_figures(None, Figures(counts, Learnt(trust + engine), 3.0, 0.25), 4), engine)
    os._exit(0)
"""


def test_several_front_ends_and_engines(tmp_path: Path) -> None:
    """Each report goes to one API server: counters of all add up, of what is learnt the last word holds."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    command = [sys.executable, "-c", FRONT_ENDS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))
    text = exposed(registry)
    assert samples(text, "vllm_medusa:emitted_tokens_total") == {"": 6}
    assert samples(text, "vllm_medusa:emitted_tokens_total", engine="1") == {"": 8}
    assert samples(text, "vllm_medusa:drafted_nodes_by_rank_total") == {"1": 4, "2": 4}
    assert samples(text, "vllm_medusa:trust_ratio") == {"": 0.25}
    assert samples(text, "vllm_medusa:trust_ratio", engine="1") == {"": 1.25}


def test_a_plain_engine_shows_none(tiny: Engine) -> None:
    """Also after a Medusa engine in the same process."""
    from vllm.v1.metrics.loggers import StatLoggerManager

    StatLoggerManager(tiny.llm.llm_engine.vllm_config)
    assert "vllm:num_requests_running" in exposed()
    assert "vllm_medusa" not in exposed()


def test_the_page_names_every_metric() -> None:
    from vllm_medusa.host.metrics.prometheus import COUNTERS, GAUGES, PREFIX

    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(vllm_medusa:\w+)` \|.*\| (?:`(\w+)`)? ?\|$", page, re.MULTILINE))
    wanted = {f"{PREFIX}{name}_total": label or "" for name, (_, label) in COUNTERS.items()}
    assert rows == wanted | {PREFIX + name: label or "" for name, (_, label) in GAUGES.items()}
