"""How many tokens of a walk a request gets: none behind its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.core.sched.utils import check_stop

Ints = npt.NDArray[np.int64]


class _Request:
    """What the host's `check_stop` reads of a request, while tokens are tried one by one."""

    pooling_params = None

    def __init__(self, state: Any, longest: int) -> None:
        params = state.sampling_params
        self.sampling_params = params
        self.output_token_ids: list[int] = state.output_token_ids
        self.num_output_tokens = len(self.output_token_ids)
        self.num_tokens = state.num_prompt_tokens + self.num_output_tokens
        self.max_tokens = longest if params.max_tokens is None else params.max_tokens


def emitted_lengths(states: Sequence[Any], tokens: Ints, walked: Ints, max_model_len: int) -> Ints:
    """Ask the host's own rules where each request ends.

    A walk goes on behind an end-of-sequence token (a draft may have it in the middle of a path); the engine core
    drops what comes after. It is dropped here in the same way, so that figures count what requests got.

    Args:
        states: R requests as the host's runner keeps them, without this step's tokens.
        tokens: int64 [R, D + 1], walked tokens, padded with -1.
        walked: int64 [R], tokens of each walk.
        max_model_len: the host's limit on prompt and answer together.

    Returns:
        int64 [R], at most `walked`.
    """
    emitted = walked.copy()
    for row, (state, length) in enumerate(zip(states, walked.tolist(), strict=True)):
        if length < 2 or state.sampling_params is None:
            continue
        request = _Request(state, max_model_len)
        history, before = request.output_token_ids, request.num_output_tokens
        try:
            for place, token in enumerate(tokens[row, : length - 1].tolist(), start=1):  # the last one cuts nothing off
                history.append(token)
                request.num_output_tokens += 1
                request.num_tokens += 1
                if check_stop(request, max_model_len):
                    emitted[row] = place
                    break
        finally:
            del history[before:]
    return emitted
