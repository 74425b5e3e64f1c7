"""Whether two tokens are a tie: in float64, either one is the choice of plain vLLM's own sampler if its logit is a
rounding error larger."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from engines import Engine

ROUNDING = 1e-4  # of logits, where float32's own sums differ by 2e-5


class Tie(NamedTuple):
    """Two tokens between which rounding decides, and their logits in float64."""

    ours: int
    theirs: int
    logits: tuple[float, float]


class Referee:
    """Judges differences from plain vLLM, with the same model in float64."""

    def __init__(self, plain: Engine, model: Path) -> None:
        """`plain`: vLLM without speculation, one request at a time; `model`: the folder that it serves."""
        from transformers import AutoModelForCausalLM

        self.plain = plain
        self.model = AutoModelForCausalLM.from_pretrained(model).double().eval()

    @torch.inference_mode()
    def logits(self, text: list[int]) -> torch.Tensor:
        """float64 [V], after the text."""
        return self.model(torch.tensor([text])).logits[0, -1]

    def judge(self, prompt: list[int], params: Any, copy: int, ours: list[int], theirs: list[int]) -> Tie | None:
        """The tie at which two answers part; None: they part where there is none.

        Args:
            prompt: of the request.
            params: what it asks for.
            copy: which of its answers.
            ours, theirs: two answers, of plain vLLM the second one.
        """
        place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if place is None:  # one goes on where the other ends
            return None
        logits = self.logits([*prompt, *theirs[:place]])
        for token in (ours[place], theirs[place]):
            raised = logits.clone()
            raised[token] += ROUNDING
            said = self._say(prompt, params, copy, place, raised)
            if said[: place + 1] != [*theirs[:place], token]:
                return None
        return Tie(ours[place], theirs[place], (float(logits[ours[place]]), float(logits[theirs[place]])))

    def _say(self, prompt: list[int], params: Any, copy: int, place: int, logits: torch.Tensor) -> list[int]:
        """What plain vLLM answers, alone, if these are the logits of one of its places."""
        runner = self.plain.runner
        compute, is_done = runner.model.compute_logits, []

        def compute_logits(hidden: torch.Tensor, *args: Any) -> torch.Tensor:
            rows = compute(hidden, *args)
            for row, name in enumerate(runner.input_batch.req_ids):
                mine = params.n == 1 or name.startswith(f"{copy}_")
                if mine and not is_done and len(runner.requests[name].output_token_ids) == place:
                    rows[row] = logits.to(rows.dtype)
                    is_done.append(name)
            return rows

        runner.model.compute_logits = compute_logits
        try:
            asked = [{"prompt_token_ids": prompt}]
            (output,) = self.plain.llm.generate(asked, params, use_tqdm=False)
        finally:
            del runner.model.compute_logits
        return list(output.outputs[copy].token_ids)
