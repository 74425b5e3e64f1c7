"""Sessions that go on (`StreamingInput`) beside a schedule's requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outcomes import Running, Violation
from schedules import Ask, Talk

if TYPE_CHECKING:
    from hostile import World


@dataclass
class _Session:
    """One of them: turns sent so far, the answers, and what the turn under way is in the world's book."""

    talk: Talk
    sent: int = 0
    said: list[list[int]] = field(default_factory=lambda: [[]])
    ended: bool = False


class Talking:
    """Sends turns, and compares each answer with what plain decoding says to the text before it."""

    def __init__(self, world: World, talks: Sequence[Talk]) -> None:
        """Talk to the engine with trees."""
        self._world = world
        self._sessions = {f"talk {number}": _Session(talk) for number, talk in enumerate(talks)}
        self._heard: list[Any] = []
        core = world.engine.engine_core
        if talks and "get_output" not in core.__dict__:
            original = core.get_output

            def get_output() -> Any:
                outputs = original()
                world.heard = list(outputs.outputs)
                return outputs

            core.get_output = get_output
        world.heard = []

    @property
    def tokens(self) -> int:
        """All of the turns'."""
        turns = [turn for session in self._sessions.values() for turn in session.talk.turns]
        return sum(len(prompt) + most for prompt, most in turns)

    def __bool__(self) -> bool:
        return not all(session.ended for session in self._sessions.values())

    def go_on(self, tick: int) -> None:
        """Send what is to be sent before this step."""
        for name, session in self._sessions.items():
            if session.sent == 0 and tick >= session.talk.arrives:
                for _ in range(len(session.talk.turns) if session.talk.at_once else 1):
                    self._send(name, session)

    def listen(self) -> None:
        """Read what the step has said."""
        heard, self._world.heard = self._world.heard, []
        for output in heard:
            session = self._sessions.get(output.request_id)
            if session is None:
                continue
            said = session.said[-1]
            said += output.new_token_ids
            entry = self._world.running[output.request_id]
            if said != entry.truth[: len(said)]:
                raise Violation("tokens", f"{output.request_id}, turn {len(session.said)}: {said}, not {entry.truth}")
            if output.finish_reason is None:
                continue
            if len(said) != len(entry.truth):
                raise Violation("tokens", f"{output.request_id} ended after {said}, not {entry.truth}")
            self._world.totals.turns += 1
            if len(session.said) == len(session.talk.turns):
                session.ended = entry.done = True
                self._end(output.request_id)
                continue
            session.said.append([])
            if not session.talk.at_once:
                self._send(output.request_id, session)
            self._enter(output.request_id, session)

    def _text(self, session: _Session) -> list[int]:
        """What stands before the answer under way: vLLM drops the last token of each earlier one."""
        turn = len(session.said) - 1
        pairs = zip(session.talk.turns[:turn], session.said, strict=False)
        return [*(t for (prompt, _), said in pairs for t in (*prompt, *said[:-1])), *session.talk.turns[turn][0]]

    def _enter(self, name: str, session: _Session) -> None:
        ask = Ask(self._text(session), session.talk.turns[len(session.said) - 1][1], sampling=_SAMPLING, number=1000)
        self._world.ask_plain([ask])
        longer = self._world.truth(ask)
        room = self._world.scheduler.max_model_len - len(ask.prompt)
        self._world.running[name] = Running(ask, longer[: min(ask.max_tokens, room)], longer)

    def _send(self, name: str, session: _Session) -> None:
        prompt, most = session.talk.turns[session.sent]
        if session.sent == 0:
            self._enter(name, session)
        session.sent += 1
        self._add(name, prompt, most, resumable=True)

    def _end(self, name: str) -> None:
        self._add(name, [2], 1, resumable=False)  # no more input

    def _add(self, name: str, prompt: list[int], most: int, *, resumable: bool) -> None:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=most, **_SAMPLING)
        request = self._world.engine.input_processor.process_inputs(
            name, {"prompt_token_ids": list(prompt)}, params, ("generate",), resumable=resumable
        )
        self._world.core.add_request(*self._world.core.preprocess_add_request(request))


_SAMPLING = {"temperature": 0.0, "ignore_eos": True}
