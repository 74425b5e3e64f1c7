"""An engine that ends with the process that started it: vLLM's own processes outlive a front end that was killed."""

import os
import signal
import threading
import time

WORKER = "vllm_medusa.host.owned.Owned"


class Owned:
    """For vLLM's `worker_extension_cls`; `llm.collective_rpc("end_with", args=(os.getpid(),))` once it is up."""

    def end_with(self, owner: int) -> None:
        """End this engine's processes when the process `owner` is gone, however it went.

        Else they would finish what they were asked, for nobody. On the owner's machine; elsewhere vLLM's executor ends
        them with the engine.
        """
        if owner != os.getpid() and is_alive(owner):
            threading.Thread(target=end_with, args=(owner, os.getppid()), daemon=True).start()


def end_with(owner: int, parent: int) -> None:
    """Wait for the end of `owner`, then end the engine core `parent` and this process."""
    while is_alive(owner):
        time.sleep(0.5)
    if parent != owner and os.getppid() == parent:  # the engine core; else whoever adopted us
        os.kill(parent, signal.SIGKILL)
    os._exit(1)


def is_alive(process: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's by now? still there
        pass
    return True
