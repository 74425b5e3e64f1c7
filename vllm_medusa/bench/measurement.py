"""What one run over a list of prompts gave, before figures are drawn from it."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Measurement:
    """One run, as plain values that travel as JSON.

    Attributes:
        seconds: from the first request to the last token.
        steps: engine steps that gave tokens.
        request_steps: sum of those steps over the requests that decoded in them: the step that computed the last of a
            request's prompt, and brought its first token, is none.
        outputs: the tokens that answer each prompt.
        drafted_nodes: tokens drafted, over all steps.
        report: Medusa's own report, where the method has one.
        first_token: seconds from sending a request to its first token, one a request; servers only.
        inter_token: seconds between a token and the one before it, one for each token but a request's first ones (see
            `client.Answer.inter_token`); servers only.
    """

    seconds: float
    steps: int
    request_steps: int
    outputs: list[list[int]] = field(default_factory=list)
    drafted_nodes: int = 0
    report: dict[str, Any] | None = None
    first_token: list[float] = field(default_factory=list)
    inter_token: list[float] = field(default_factory=list)
