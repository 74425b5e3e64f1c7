"""Where requests end, by the host's own rules.

A walk goes on behind an end-of-sequence token (a draft may have it in the middle of a path), or behind the last token
that a request may emit; the engine core drops what comes after. So figures leave it out, and it takes no draws from a
generator, with which a session's next turn goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.core.sched.utils import check_stop

Ints = npt.NDArray[np.int64]


class Ends:
    """The ends of a batch's requests, asked for token by token."""

    def __init__(self, states: Sequence[Any] = (), max_model_len: int = 0) -> None:
        """Of R requests.

        Args:
            states: requests as the host's runner keeps them; none: no request ends.
            max_model_len: the host's limit on prompt and answer together.
        """
        self._states, self._longest = states, max_model_len
        self._requests: dict[int, _Request] = {}

    def __call__(self, row: int) -> bool:
        """Whether the request of this row ends with the last token of its history."""
        if not self._states or self._states[row].sampling_params is None:
            return False
        if row not in self._requests:
            self._requests[row] = _Request(self._states[row], self._longest)
        return bool(check_stop(self._requests[row], self._longest))

    def lengths(self, tokens: Ints, walked: Ints) -> Ints:
        """How many tokens of its walk each request gets.

        Args:
            tokens: int64 [R, D + 1], walked tokens, padded with -1.
            walked: int64 [R], tokens of each walk.

        Returns:
            int64 [R], at most `walked`.
        """
        emitted = walked.copy()
        for row in np.flatnonzero(walked > 1).tolist() if self._states else ():
            history: list[int] = self._states[row].output_token_ids
            before = len(history)
            try:
                for place in range(walked[row] - 1):  # the last one cuts nothing off
                    history.append(int(tokens[row, place]))
                    if self(row):
                        emitted[row] = place + 1
                        break
            finally:
                del history[before:]
        return emitted


class _Request:
    """What the host's `check_stop` reads of a request, while its history grows."""

    pooling_params = None

    def __init__(self, state: Any, longest: int) -> None:
        params = state.sampling_params
        self.sampling_params = params
        self.output_token_ids: list[int] = state.output_token_ids
        self.max_tokens = longest if params.max_tokens is None else params.max_tokens
        self._prompt = state.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return int(self._prompt) + len(self.output_token_ids)
