"""A `vllm serve` in a process of its own, measured from outside as its users see it."""

import asyncio
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Self

import aiohttp

from vllm_medusa.bench.client import Client, ServerError
from vllm_medusa.bench.measurement import Measurement
from vllm_medusa.bench.peers import has_report
from vllm_medusa.bench.process import EngineProcess, Progress, ignore

POLL_SECONDS = 0.5
# One observation for each engine step that gave tokens; for each request and step but its first.
STEPS = "vllm:iteration_tokens_total_count"
REQUEST_STEPS = "vllm:inter_token_latency_seconds_count"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"


class Server(EngineProcess):
    """One `vllm serve` on a free port of this machine (`serving.py` is its process)."""

    module = "vllm_medusa.bench.serving"

    def __init__(
        self,
        name: str,
        engine: Mapping[str, Any],
        *,
        environment: Mapping[str, str],
        export_heads: bool = False,
        verbose: bool = False,
    ) -> None:
        """`engine`: keyword arguments of `vllm.LLM`. `export_heads`: write the heads for vLLM's own Medusa first."""
        self._port = free_port()
        self._url = f"http://127.0.0.1:{self._port}"
        self._reports = has_report(engine.get("speculative_config"))
        self._eager = bool(engine.get("enforce_eager"))
        self._chat: bool | None = None  # whether the model has a chat template; known after the first prompt
        first = {"engine": dict(engine), "port": self._port}
        # With its developer's routes the server hands on Medusa's report; nothing else in it changes.
        environment = {**environment, "VLLM_SERVER_DEV_MODE": "1"}
        super().__init__(name, first, environment=environment, export_heads=export_heads, verbose=verbose)

    def wait_until_ready(self, progress: Progress = ignore) -> Self:
        """Wait until the server says that it is well; raises MedusaError with the cause when it ends before."""
        began = time.perf_counter()
        length = self._result(progress)
        progress({"text": "starting the server"})
        while not asyncio.run(self._healthy()):
            if self._process.poll() is not None:
                raise self._failure("it ended while it started")
            time.sleep(POLL_SECONDS)
        dtype = re.search(r"\bdtype=torch\.(\w+)", self.log.read_text(errors="replace"))
        self.facts = {
            "start_seconds": time.perf_counter() - began,
            "dtype": dtype.group(1) if dtype else None,  # None where the log goes elsewhere
            "compiled": not self._eager,
            "max_model_len": length,
        }
        return self

    def run(
        self, prompts: Sequence[str], *, batch_size: int, sampling: Mapping[str, Any], progress: Progress = ignore
    ) -> dict[str, Any]:
        """Answer the prompts with `batch_size` requests in flight; the fields of `measurement.Measurement`."""
        return self._asked(self._run(prompts, batch_size, sampling, progress))

    def lengths(self, prompts: Sequence[str]) -> list[int]:
        """The number of tokens of each prompt, as `run` asks for it."""
        return list(self._asked(self._lengths(prompts)))

    def decode(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token."""
        return self._asked(self._decode(tokens))

    def _asked(self, question: Any) -> Any:
        """The coroutine's result; what the server did wrong as one readable error."""
        try:
            return asyncio.run(question)
        except ServerError as error:
            raise self._failure(str(error), known=True) from error
        except (aiohttp.ClientError, TimeoutError) as error:  # it is gone, or silent
            raise self._failure(f"{type(error).__name__}: {error}") from error

    async def _healthy(self) -> bool:
        async with Client(self._url) as client:
            return await client.healthy()

    async def _run(
        self, prompts: Sequence[str], batch_size: int, sampling: Mapping[str, Any], progress: Progress
    ) -> dict[str, Any]:
        async with Client(self._url) as client:
            requests = [
                {**sampling, "prompt": await self._encode(client, prompt)}
                # the same noise for every method, so that outputs can be compared
                | ({"seed": index} if sampling["temperature"] > 0 else {})
                for index, prompt in enumerate(prompts)
            ]
            await self._report(client)
            before = await client.counters()
            began = time.perf_counter()
            answers = await client.ask_all(requests, batch_size, progress)
            seconds = time.perf_counter() - began
            after = await client.counters()
            report = await self._report(client)

        def counted(name: str) -> int:
            return int(after.get(name, 0.0) - before.get(name, 0.0))

        return asdict(
            Measurement(
                seconds,
                steps=counted(STEPS),
                request_steps=counted(REQUEST_STEPS),
                outputs=[answer.tokens for answer in answers],
                drafted_nodes=counted(DRAFTED) if report is None else report["drafted_nodes"],
                report=report,
                first_token=[answer.first_token for answer in answers],
                inter_token=[latency for answer in answers for latency in answer.inter_token()],
            )
        )

    async def _encode(self, client: Client, prompt: str) -> list[int]:
        """The prompt's tokens, inside the chat template where the model has one: the same as offline."""
        if self._chat is not False:
            try:
                chat = {"messages": [{"role": "user", "content": prompt}], "add_generation_prompt": True}
                tokens = await client.post("/tokenize", chat)
                self._chat = True
                return list(tokens["tokens"])
            except ServerError:
                if self._chat:
                    raise
                self._chat = False
        return list((await client.post("/tokenize", {"prompt": prompt}))["tokens"])

    async def _lengths(self, prompts: Sequence[str]) -> list[int]:
        async with Client(self._url) as client:
            return [len(await self._encode(client, prompt)) for prompt in prompts]

    async def _report(self, client: Client) -> dict[str, Any] | None:
        """Medusa's report since the last one, where the method has one."""
        if not self._reports:
            return None
        answer = await client.post("/collective_rpc", {"method": "medusa_report", "kwargs": {"reset": True}})
        return dict(answer["results"][0])

    async def _decode(self, tokens: Sequence[int]) -> list[str]:
        async with Client(self._url) as client:
            return [(await client.post("/detokenize", {"tokens": [token]}))["prompt"] for token in tokens]


def free_port() -> int:
    """A port of this machine on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
