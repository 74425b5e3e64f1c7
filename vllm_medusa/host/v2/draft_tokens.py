"""What the scheduler fetches of drafts on Model Runner V2: where a request has a grammar, the shape of trees too."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.async_utils import async_copy_to_np
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from vllm_medusa.host.grammar import TreeDraftTokenIds
from vllm_medusa.host.v2.slots import SlotTrees


class TreeDraftTokensHandler(DraftTokensHandler):
    """The host's handler: it copies drafts to the engine core, on a stream of its own, if a grammar has to see them."""

    def __init__(self, device: torch.device, trees: SlotTrees) -> None:
        """Hand on the shapes of `trees`."""
        super().__init__(device)
        self._trees = trees
        self._parents: npt.NDArray[np.int64] | None = None

    def set_draft_tokens(self, input_batch: Any, draft_tokens: Tensor) -> None:
        """The host's copy, and beside it the parents, complete when the same event is."""
        super().set_draft_tokens(input_batch, draft_tokens)
        self._parents = None
        if self.draft_tokens_np is None:
            return
        parents = self._trees.parents[input_batch.idx_mapping, : draft_tokens.shape[1]]
        self.copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.copy_stream):
            self._parents = async_copy_to_np(parents)
            parents.record_stream(self.copy_stream)  # not to be used anew before it is copied
            self.copy_event.record()

    def get_draft_tokens(self) -> DraftTokenIds:
        """Drafts in the order of the batch."""
        drafts = super().get_draft_tokens()
        if self._parents is None:
            return drafts
        parents = dict(zip(drafts.req_ids, self._parents.tolist(), strict=True))
        return TreeDraftTokenIds(drafts.req_ids, drafts.draft_token_ids, parents, whole=True)
