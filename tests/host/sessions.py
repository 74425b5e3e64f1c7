"""Sessions that go on (`StreamingInput`), driven step by step in an in-process engine core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engines import Engine


@dataclass
class Session:
    """Turns of one request, each with new tokens and parameters; `said` are the answers."""

    turns: Sequence[tuple[list[int], dict[str, Any]]]
    said: list[list[int]] = field(default_factory=list)
    sent: int = 0

    def text(self, turn: int) -> list[int]:
        """What stands before the answer of a turn: vLLM drops the last token of each earlier answer."""
        before = [
            token
            for (prompt, _), answer in zip(self.turns[:turn], self.said, strict=False)
            for token in (*prompt, *answer[:-1])
        ]
        return [*before, *self.turns[turn][0]]


def talk(engine: Engine, sessions: Sequence[Session], *, at_once: bool = False) -> list[list[list[int]]]:
    """What an engine says in each turn of each session.

    Args:
        engine: in this process.
        sessions: their answers are noted.
        at_once: all turns are sent before the first is answered, else each when the one before has ended.
    """
    from vllm import SamplingParams

    host = engine.llm.llm_engine
    core = host.engine_core.engine_core

    def send(name: str, prompt: list[int], params: dict[str, Any], *, resumable: bool) -> None:
        made = SamplingParams(**{"temperature": 0, "ignore_eos": True, **params})
        request = host.input_processor.process_inputs(
            name, {"prompt_token_ids": [*prompt]}, made, ("generate",), resumable=resumable
        )
        core.add_request(*core.preprocess_add_request(request))

    def go_on(number: int) -> None:
        session = sessions[number]
        if session.sent == len(session.turns):
            send(f"session {number}", [0], {"max_tokens": 1}, resumable=False)  # no more input
            return
        send(f"session {number}", *session.turns[session.sent], resumable=True)
        session.sent += 1

    for number, session in enumerate(sessions):
        session.said, session.sent = [[]], 0
        for _ in range(len(session.turns) if at_once else 1):
            go_on(number)
    while core.scheduler.has_requests() or core.batch_queue:
        outputs, executed = core.step_fn()
        core.post_step(executed)
        for output in (o for by_client in (outputs or {}).values() for o in by_client.outputs):
            number = int(output.request_id.split()[1])
            session = sessions[number]
            session.said[-1] += output.new_token_ids
            if output.finish_reason is None:
                continue
            if len(session.said) == len(session.turns):
                go_on(number)
                continue
            session.said.append([])
            if not at_once:
                go_on(number)
    return [session.said for session in sessions]
