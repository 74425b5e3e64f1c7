"""The heads: small residual networks on one hidden row, each guessing one token further ahead.

    first block   h_k = h + SiLU(W_k h + U_k e(root) + b_k)      U_k only in root-conditioned heads
      or trunk    h_k = h + D_k SiLU(W h + U e(root) + b) + c_k  the layer inside is shared by all heads
    next blocks   h_k = h_k + SiLU(W_k h_k + b_k)
    logits_k      h_k E^T                                        E: the target's own unembedding, by default

Plain heads are those of Medusa (Cai et al. 2024, arXiv:2401.10774, section 2.1). Root-conditioned heads also see the
root token, which is already sampled when we draft. They stay independent of each other given the root, so one tree
grows from one set of candidates. Heads with a trunk share what they make of the two, so that the same number of weights
holds more features. Weights of all heads are stacked: a block is one (batched) product, so are the logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads import native
from vllm_medusa.heads.config import HeadsConfig, is_padding
from vllm_medusa.heads.frozen import FrozenHeads

_FEW_ROWS = 128
_GROUP = 128


class Candidates(NamedTuple):
    """What the heads guess for B requests, best first.

    Attributes:
        tokens: int64 [B, K, R], token ids of the target's vocabulary.
        probabilities: float32 [B, K, R], calibrated, descending along R.
    """

    tokens: Tensor
    probabilities: Tensor


class _Block(nn.Module):
    """One residual block of every head: weight [K, H, H], bias [K, H] or none."""

    def __init__(self, num_heads: int, hidden_size: int, bias: bool) -> None:
        super().__init__()
        # Zeros: an untrained head guesses what the target's own row says, Medusa's start.
        self.weight = nn.Parameter(torch.zeros(num_heads, hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(num_heads, hidden_size)) if bias else None


class _Trunk(nn.Module):
    """The layer that all heads share, M features wide, and each head's way back: weight [M, H], out [K, H, M]."""

    def __init__(self, num_heads: int, hidden_size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, hidden_size))
        self.bias = nn.Parameter(torch.zeros(width))
        self.out = nn.Parameter(torch.zeros(num_heads, hidden_size, width))
        self.out_bias = nn.Parameter(torch.zeros(num_heads, hidden_size))


class MedusaHeads(nn.Module):
    """K heads; `bind` ties them to a target before use.

    Two heads on rows of size 4, in a vocabulary of 8:

    >>> heads = MedusaHeads(HeadsConfig(num_heads=2, num_layers=1, hidden_size=4, vocab_size=8, top_k=3))
    >>> heads.bind(torch.eye(8, 4), torch.eye(8, 4))
    >>> tokens, probabilities = heads.candidates(torch.tensor([[0.0, 5.0, 1.0, 0.0]]), torch.tensor([3]), 2)
    >>> tokens.tolist(), tuple(probabilities.shape)
    ([[[1, 2], [1, 2]]], (1, 2, 2))
    """

    token_map: Tensor | None

    def __init__(self, config: HeadsConfig) -> None:
        """Heads of `config`'s shape with weights zero; `load_heads` fills them."""
        super().__init__()
        self.config = config
        heads, hidden = config.num_heads, config.hidden_size
        self.layers = nn.ModuleList(_Block(heads, hidden, config.bias) for _ in range(config.num_layers))
        self.trunk = None if config.trunk_size is None else _Trunk(heads, hidden, config.trunk_size)
        rooted = (heads, hidden, hidden) if config.trunk_size is None else (config.trunk_size, hidden)
        self.root = nn.Parameter(torch.zeros(rooted)) if config.root_conditioned else None
        copies = {"target": 0, "shared": 1, "per_head": heads}[config.unembedding]
        own = torch.zeros(copies, config.num_outputs, hidden)
        self.unembedding = nn.Parameter(own, requires_grad=False) if copies else None
        reduced = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size)
        self.register_buffer("token_map", reduced)
        # The target's own weights, where the heads need them: not parameters, not saved, not moved by .to().
        self._bound_unembedding: Tensor | None = None
        self._bound_embedding: Tensor | None = None
        self._scale: Tensor | None = None
        self._frozen: FrozenHeads | None = None

    def bind(self, unembedding: Tensor, embedding: Tensor) -> None:
        """Tie the heads to a target.

        Heads whose vocabulary is padded beyond the target's are cut to it, and those that did not know it learn it:
        their `config` changes accordingly.

        Args:
            unembedding: [V, H], the target's lm_head. Shared as it is, or its rows `token_map` copied once. Rows
                beyond the heads' V (padding of the target's vocabulary) are left out.
            embedding: [V, H], the target's token embedding, shared (read by root-conditioned heads only).

        Raises:
            MedusaError: a target of other sizes.
        """
        config = self.config
        vocab = unembedding.shape[0]
        for name, weight in (("lm_head", unembedding), ("embedding", embedding)):
            fits = weight.shape[0] >= config.vocab_size or is_padding(weight.shape[0], config.vocab_size)
            if not fits or weight.shape[1] != config.hidden_size:
                wanted = f"the heads need [{config.vocab_size}, {config.hidden_size}]; use heads made for this target"
                raise MedusaError.of(f"{name} of the target", list(weight.shape), wanted)
        if config.vocab_size == 0 or config.vocab_size > vocab:
            self._cut_to(vocab)
            config = self.config
        unembedding = unembedding[: config.vocab_size]
        if self.unembedding is None:
            rows = unembedding if self.token_map is None else unembedding[self.token_map.to(unembedding.device)]
            self._bound_unembedding = rows.contiguous()[None]
        # Not cut: a root may be a token that was added to the target after the heads' training.
        self._bound_embedding = embedding if config.root_conditioned else None
        calibration = config.calibration
        temperatures = calibration.temperatures if calibration is not None else [1.0] * config.num_heads
        scale = torch.tensor([config.logit_scale / temperature for temperature in temperatures])
        self._scale = scale.to(unembedding.device)[None, :, None]
        self._frozen = None

    def freeze(self) -> None:
        """After `bind`, once no weight changes any more: `candidates` of few rows come from a quick copy."""
        if FrozenHeads.suits(self):
            assert self._scale is not None
            self._frozen = FrozenHeads(self, self._scale.flatten(), self._bound_embedding)

    def _cut_to(self, vocab: int) -> None:
        """Leave out tokens from `vocab` on: padding that the target does not have, so it never says them."""
        sizes: dict[str, int] = {"vocab_size": vocab}
        if self.token_map is not None:
            kept = (self.token_map < vocab).nonzero().flatten()
            self.token_map = self.token_map[kept]
            sizes["draft_vocab_size"] = len(kept)
        else:
            kept = torch.arange(vocab)
        if self.unembedding is not None:
            own = self.unembedding.data[:, kept.to(self.unembedding.device)]
            self.unembedding = nn.Parameter(own, requires_grad=False)
        outputs = sizes.get("draft_vocab_size", vocab)
        self.config = self.config.model_copy(update={**sizes, "top_k": min(self.config.top_k, outputs)})

    def unembedding_weight(self) -> Tensor:
        """[1 or K, Vd, H]: what hidden rows are multiplied with, the target's own unless the heads bring theirs.

        Raises:
            MedusaError: `bind` has not been called.
        """
        if self._scale is None:
            raise MedusaError("medusa: heads are not bound to a target; call bind(unembedding, embedding) first")
        if self.unembedding is not None:
            return self.unembedding.data
        assert self._bound_unembedding is not None
        return self._bound_unembedding

    @property
    def temperatures(self) -> Tensor:
        """float32 [1, K, 1], calibrated, by which `forward`'s logits are divided; 1 without calibration."""
        assert self._scale is not None, "bind comes first"
        return self.config.logit_scale / self._scale

    def embedding_rms(self) -> float:
        """Root mean square of the bound embedding's entries."""
        assert self._bound_embedding is not None, "bind root-conditioned heads first"
        return float(self._bound_embedding.float().square().mean().sqrt())

    def states(self, hidden: Tensor, root_tokens: Tensor | None) -> Tensor:
        """Every head's row before its unembedding.

        Args:
            hidden: [B, H], the target's rows after the final norm.
            root_tokens: int64 [B], the tokens these rows produced; only root-conditioned heads read them.

        Returns:
            [B, K, H].
        """
        config = self.config
        shape = (hidden.shape[0], config.num_heads, config.hidden_size)
        states = hidden[:, None].expand(shape)
        if self.trunk is not None:
            inner = _product(hidden, self.trunk.weight) + self._root_term(root_tokens) + self.trunk.bias
            back = _product(functional.silu(inner), self.trunk.out.flatten(0, 1)).reshape(shape)
            states = states + (back + self.trunk.out_bias)
        for number, block in enumerate(self.layers):
            assert isinstance(block, _Block)
            if number == 0 and self.trunk is None:  # all heads read the same row: one plain product
                inner = _product(hidden, block.weight.flatten(0, 1)).reshape(shape)
                if self.root is not None:
                    inner = inner + self._root_term(root_tokens).reshape(shape)
            else:
                inner = _product(states.transpose(0, 1), block.weight).transpose(0, 1)
            if block.bias is not None:
                inner = inner + block.bias
            states = states + functional.silu(inner)
        return states

    def _root_term(self, root_tokens: Tensor | None) -> Tensor:
        assert self.root is not None
        if self._bound_embedding is None or root_tokens is None:
            raise MedusaError("medusa: root-conditioned heads need bind(unembedding, embedding) and the root tokens")
        return _product(self._bound_embedding[root_tokens], self.root.flatten(0, -2))

    def forward(self, hidden: Tensor, root_tokens: Tensor | None) -> Tensor:
        """Logits [B, K, Vd] of every head, over the draft vocabulary, without temperature. Arguments as in `states`."""
        logits = self._logits(self.states(hidden, root_tokens))
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale

    def candidates(self, hidden: Tensor, root_tokens: Tensor | None, k: int) -> Candidates:
        """The `k` likeliest tokens of every head. Arguments as in `states`; see `Candidates` for the result."""
        assert self._scale is not None, "bind comes first"
        if self._frozen is not None and self._frozen.takes(hidden):
            places, probabilities = self._frozen.guess(hidden, root_tokens, k)
            return Candidates(places if self.token_map is None else self.token_map[places], probabilities)
        logits = self._logits(self.states(hidden, root_tokens))
        rows, heads = logits.shape[:2]
        found = native.best_tokens(logits.flatten(0, 1), self._scale.flatten().repeat(rows), k)
        if found is not None:
            places, probabilities = (part.view(rows, heads, k) for part in found)
            return Candidates(places if self.token_map is None else self.token_map[places], probabilities)
        scaled = logits.to(torch.float32, memory_format=torch.contiguous_format).mul_(self._scale)
        values, places = _largest(scaled, k)
        probabilities = (values - scaled.logsumexp(-1, keepdim=True)).exp_()
        return Candidates(places if self.token_map is None else self.token_map[places], probabilities)

    def _logits(self, states: Tensor) -> Tensor:
        """[B, K, Vd] from states [B, K, H], without `logit_scale`."""
        weight = self.unembedding_weight()
        if weight.shape[0] == 1:
            return _product(states.flatten(0, 1), weight[0]).view(*states.shape[:2], -1)
        return _product(states.transpose(0, 1), weight).transpose(0, 1)


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    """rows @ weight^T: [..., N, H] and [..., M, H] give [..., N, M].

    On a CPU, oneDNN packs the right matrix anew at every call. For few rows that costs more than the product, so
    there the large matrix goes to the left (8192 x 576 in bfloat16, 4 rows: 0.6 ms in place of 1.0 on one core).
    """
    if rows.device.type == "cpu" and rows.shape[-2] <= _FEW_ROWS:
        return (weight @ rows.transpose(-1, -2)).transpose(-1, -2)
    return rows @ weight.transpose(-1, -2)


def _largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and places of the k largest along the last dimension, descending.

    On a CPU, in two rounds: the k largest lie in the k groups with the largest maxima, so only these are searched.
    """
    size = scores.shape[-1]
    groups = size // _GROUP
    if scores.device.type != "cpu" or size % _GROUP != 0 or groups <= k:
        best = scores.topk(k, dim=-1)
        return best.values, best.indices
    grouped = scores.view(*scores.shape[:-1], groups, _GROUP)
    chosen = grouped.amax(-1).topk(k, dim=-1, sorted=False).indices
    members = grouped.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, _GROUP)).flatten(-2)
    best = members.topk(k, dim=-1)
    group = chosen.gather(-1, best.indices // _GROUP)
    return best.values, group * _GROUP + best.indices % _GROUP
