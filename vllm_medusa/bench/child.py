"""What a child process that owns an engine does whatever the engine: hear its parent, answer it, end with it."""

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn, TextIO

END_SECONDS = 15.0

Say = Callable[..., None]  # say(event, **data) writes a line to the parent
Commands = SimpleQueue[dict[str, Any] | None]


def serve_parent(work: Callable[[Commands, Say], None], *, stop: Callable[[], None] = lambda: None) -> NoReturn:
    """Run `work` on the parent's commands until it returns, then end this process and all that it started.

    Commands are JSON lines on our standard input, None when it ends: then `stop` is called (in a thread), and whoever
    is still busy a while later is killed. So an engine never outlives the bench that started it, however that ended.
    """
    answers = open(int(sys.argv[1]), "w", encoding="utf-8", buffering=1)  # noqa: SIM115 (lives as long as we do)

    def say(event: str, **data: Any) -> None:
        print(json.dumps({"event": event, **data}), file=answers)

    commands: Commands = SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin, commands, stop), daemon=True).start()
    try:
        work(commands, say)
    except Exception as error:  # noqa: BLE001 (told to the parent, whatever it is)
        traceback.print_exc()
        with suppress(BrokenPipeError):  # nobody may be left to hear it
            say("error", kind=type(error).__name__, message=str(error))
    except (KeyboardInterrupt, SystemExit):  # how vLLM's server leaves
        pass
    end()


def end() -> NoReturn:
    """End this process with vLLM's engine and workers, which otherwise may outlive an engine that was interrupted."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getpgrp() == os.getpid():  # the group is ours alone
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def use_exported_heads(engine: dict[str, Any], folder: str) -> None:
    """Let vLLM's own Medusa load our heads, written in its format into `folder`."""
    from vllm_medusa.bench.native import export_heads

    speculative = engine["speculative_config"]
    speculative["num_speculative_tokens"] = export_heads(speculative["model"], engine["model"], Path(folder))
    speculative["model"] = folder


def _listen(lines: TextIO, commands: Commands, stop: Callable[[], None]) -> None:
    for line in lines:
        commands.put(json.loads(line))
    commands.put(None)
    stop()
    time.sleep(END_SECONDS)
    end()
