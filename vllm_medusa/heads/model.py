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

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads import native
from vllm_medusa.heads.config import HeadsConfig, is_padding
from vllm_medusa.heads.frozen import FrozenHeads
from vllm_medusa.heads.parts import SharedOutputs, TargetPart
from vllm_medusa.heads.products import largest, product


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
        # Of a target that is not whole here.
        self._part: TargetPart | None = None
        self._shared: SharedOutputs | None = None

    def bind(self, unembedding: Tensor, embedding: Tensor) -> None:
        """Tie the heads to a target; again, when its weights have changed.

        Heads whose vocabulary is padded beyond the target's are cut to it, and those that did not know it learn it:
        their `config` changes accordingly.

        Args:
            unembedding: [V, H], the target's lm_head. Shared as it is, or its rows `token_map` copied once. Rows
                beyond the heads' V (padding of the target's vocabulary) are left out.
            embedding: [V, H], the target's token embedding, shared (read by root-conditioned heads only).

        Raises:
            MedusaError: a target of other sizes.
        """
        for name, weight in (("lm_head", unembedding), ("embedding", embedding)):
            self._check_size(name, *weight.shape)
        self._fit(unembedding.shape[0], unembedding.device)
        unembedding = unembedding[: self.config.vocab_size]
        if self.unembedding is None:
            self._bound_unembedding = self._rows(unembedding)[None]
        # Not cut: a root may be a token that was added to the target after the heads' training.
        self._bound_embedding = embedding if self.config.root_conditioned else None
        self._part = self._shared = None

    def _rows(self, unembedding: Tensor) -> Tensor:
        """[Vd, H], of the target's unembedding; a copy only where the vocabulary is reduced."""
        if self.token_map is None:
            return unembedding.contiguous()
        places, before = self.token_map.to(unembedding.device), self._bound_unembedding
        if before is None or before.shape[1] != len(places) or before.dtype != unembedding.dtype:
            return unembedding[places]
        return torch.index_select(unembedding, 0, places, out=before[0])  # into the memory that there is

    def bind_part(self, part: TargetPart) -> None:
        """The same for a target that this process does not hold plain and whole.

        From now on `candidates` and logits are the same on every rank of the target, whatever the last bits of their
        hidden rows; every rank has to ask at the same time, for as many rows.

        Raises:
            MedusaError: a target of other sizes.
        """
        self._check_size("lm_head", part.vocab_size, part.hidden_size)
        self._fit(part.vocab_size, part.device)
        self._part, self._shared = part, None
        if self.unembedding is None:
            token_map = None if self.token_map is None else self.token_map.to(part.device)
            self._shared = SharedOutputs(part, token_map, self.config.num_outputs)

    def _check_size(self, name: str, rows: int, width: int) -> None:
        config = self.config
        fits = rows >= config.vocab_size or is_padding(rows, config.vocab_size)
        if not fits or width != config.hidden_size:
            wanted = f"the heads need [{config.vocab_size}, {config.hidden_size}]; use heads made for this target"
            raise MedusaError.of(f"{name} of the target", [rows, width], wanted)

    def _fit(self, vocab: int, device: torch.device) -> None:
        """Cut to the target's vocabulary, and put each head's scale on its device."""
        if self.config.vocab_size == 0 or self.config.vocab_size > vocab:
            self._cut_to(vocab)
        config, calibration = self.config, self.config.calibration
        temperatures = calibration.temperatures if calibration is not None else [1.0] * config.num_heads
        scale = torch.tensor([config.logit_scale / temperature for temperature in temperatures])
        self._scale = scale.to(device)[None, :, None]
        self._frozen = None

    def freeze(self) -> None:
        """After `bind`, once no weight changes any more: `candidates` of few rows come from a quick copy."""
        if self._part is None and FrozenHeads.suits(self):
            assert self._scale is not None
            self._frozen = FrozenHeads(self, self._scale.flatten(), self._bound_embedding)

    def take_weights(self, other: MedusaHeads) -> None:
        """Take over the weights of heads that were loaded from the same files, into the memory that there is.

        What is derived from them, here and of the target, is stale until the heads are bound and frozen again.
        """
        if other.config.vocab_size != self.config.vocab_size:
            other._cut_to(self.config.vocab_size)
        mine = self.state_dict()
        for name, weight in other.state_dict().items():
            mine[name].copy_(weight)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take new weights by our format's names, some or all: what a host calls that was sent trained ones.

        Returns:
            The names of what was taken.

        Raises:
            MedusaError: a name that these heads do not have, or another shape.
        """
        mine, taken = self.state_dict(), set()
        for name, weight in weights:
            if name not in mine:
                raise MedusaError.of("weight of the heads", name, f"send {', '.join(mine)}")
            if mine[name].shape != weight.shape:
                shape = list(mine[name].shape)
                raise MedusaError.of(f"shape of the heads' {name}", list(weight.shape), f"these heads have {shape}")
            mine[name].copy_(weight)
            taken.add(name)
        return taken

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
            inner = product(hidden, self.trunk.weight) + self._root_term(root_tokens) + self.trunk.bias
            back = product(functional.silu(inner), self.trunk.out.flatten(0, 1)).reshape(shape)
            states = states + (back + self.trunk.out_bias)
        for number, block in enumerate(self.layers):
            assert isinstance(block, _Block)
            if number == 0 and self.trunk is None:  # all heads read the same row: one plain product
                inner = product(hidden, block.weight.flatten(0, 1)).reshape(shape)
                if self.root is not None:
                    inner = inner + self._root_term(root_tokens).reshape(shape)
            else:
                inner = product(states.transpose(0, 1), block.weight).transpose(0, 1)
            if block.bias is not None:
                inner = inner + block.bias
            states = states + functional.silu(inner)
        return states

    def _root_term(self, root_tokens: Tensor | None) -> Tensor:
        assert self.root is not None
        if self._part is not None and root_tokens is not None:
            rows = self._part.embed(root_tokens)
        elif self._bound_embedding is not None and root_tokens is not None:
            rows = self._bound_embedding[root_tokens]
        else:
            raise MedusaError("medusa: root-conditioned heads need bind(unembedding, embedding) and the root tokens")
        return product(rows, self.root.flatten(0, -2))

    def forward(self, hidden: Tensor, root_tokens: Tensor | None) -> Tensor:
        """Logits [B, K, Vd] of every head, over the draft vocabulary, without temperature. Arguments as in `states`."""
        states = self.states(hidden, root_tokens)
        logits = self._shared.logits(states) if self._shared is not None else self._agreed(self._logits(states))
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale

    def candidates(self, hidden: Tensor, root_tokens: Tensor | None, k: int) -> Candidates:
        """The `k` likeliest tokens of every head. Arguments as in `states`; see `Candidates` for the result."""
        assert self._scale is not None, "bind comes first"
        if self._shared is not None:
            places, probabilities = self._shared.best(self.states(hidden, root_tokens), self._scale, k)
        else:
            places, probabilities = map(self._agreed, self._best(hidden, root_tokens, k))
        return Candidates(places if self.token_map is None else self.token_map[places], probabilities)

    def _best(self, hidden: Tensor, root_tokens: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
        """As `candidates`, with places among the heads' outputs, by what this process holds."""
        assert self._scale is not None, "bind comes first"
        if self._frozen is not None and self._frozen.takes(hidden):
            return self._frozen.guess(hidden, root_tokens, k)
        logits = self._logits(self.states(hidden, root_tokens))
        rows, heads = logits.shape[:2]
        found = native.best_tokens(logits.flatten(0, 1), self._scale.flatten().repeat(rows), k)
        if found is not None:
            places, probabilities = (part.view(rows, heads, k) for part in found)
            return places, probabilities
        scaled = logits.to(torch.float32, memory_format=torch.contiguous_format).mul_(self._scale)
        values, places = largest(scaled, k)
        return places, (values - scaled.logsumexp(-1, keepdim=True)).exp_()

    def _logits(self, states: Tensor) -> Tensor:
        """[B, K, Vd] from states [B, K, H], without `logit_scale`."""
        weight = self.unembedding_weight()
        if weight.shape[0] == 1:
            return product(states.flatten(0, 1), weight[0]).view(*states.shape[:2], -1)
        return product(states.transpose(0, 1), weight).transpose(0, 1)

    def _agreed(self, values: Tensor) -> Tensor:
        """What the first rank has, where there are several."""
        return values if self._part is None else self._part.gather(values.contiguous())[0]
