"""Whether heads bring in vLLM what replayed answers promise: the same prompts, the same trees, both counted."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.progress import stage
from vllm_medusa.training.answering import AnswerOptions, engine_arguments, leaves_room
from vllm_medusa.training.engine import Engine
from vllm_medusa.training.hidden import HiddenRows
from vllm_medusa.training.replay import replay

NODES, PROMPTS = 16, 32
APART = 0.05  # what the two may differ by: answers differ where two tokens are as likely, and then go on differently


@dataclass(frozen=True)
class Comparison:
    """Mean accepted lengths on the first held-out prompts, dynamic trees of NODES nodes by the heads alone.

    Attributes:
        replayed, served: tokens a step.
        prompts: how many.
    """

    replayed: float
    served: float
    prompts: int

    @property
    def agrees(self) -> bool:
        """Whether they are the same but for ties."""
        return abs(self.served - self.replayed) <= APART * self.replayed

    def in_words(self) -> str:
        """For the card and for the console."""
        found = f"{self.served:.2f} tokens a step in vLLM, {self.replayed:.2f} replayed, on {self.prompts} prompts"
        return (
            found if self.agrees else f"{found}: THEY DIFFER, something of this model is not served as it was trained"
        )


def compare_served(
    model: str,
    heads: MedusaHeads,
    folder: Path,
    prompts: Sequence[list[int]],
    rows: HiddenRows,
    options: AnswerOptions,
    console: Console,
) -> dict[str, Any]:
    """Serve the heads in `folder` for a minute and hold what they bring against what their replay promises.

    Args:
        model: the target's folder.
        heads: the same, calibrated and bound.
        folder: of the heads.
        prompts: token ids of the held-out prompts.
        rows: of the greedy answers to them.
        options: how they were answered.
        console: where stages are shown.

    Returns:
        Facts for the card: see `Comparison`; or, as `failed`, why there are none.
    """
    chosen = [ids for ids in prompts if leaves_room(ids, options)][:PROMPTS]
    promised = replay(heads, rows.first(len(chosen)), static_sizes=(), dynamic_sizes=(NODES,))[f"dynamic-{NODES}"]
    try:
        served = _serve(model, folder, chosen, options, console)
    except Exception as error:  # noqa: BLE001 (an engine may fail in any way; the heads are made all the same)
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]
        console.print(f"not compared with serving: {reason}")
        return {"failed": reason}
    found = Comparison(promised, round(served, 4), len(chosen))
    console.print(found.in_words())
    return asdict(found)


def _serve(model: str, folder: Path, prompts: Sequence[list[int]], options: AnswerOptions, console: Console) -> float:
    """Mean accepted length of the heads on these prompts, greedy."""
    from vllm import SamplingParams

    speculative = {
        "method": "medusa",
        "model": str(folder),
        "num_speculative_tokens": NODES,
        "adaptive": False,
        "prompt_lookup": False,
    }
    arguments = {**engine_arguments(model, options), "speculative_config": speculative}
    with Engine("starting vLLM with the heads", console, **arguments) as engine:
        llm = engine.llm
        with stage(console, "serving held-out prompts"):
            params = SamplingParams(temperature=0.0, max_tokens=options.longest_answer)
            llm.collective_rpc("medusa_report", kwargs={"reset": True})
            llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            reports = llm.collective_rpc("medusa_report")
    return float(reports[0]["mean_accepted_length"])
