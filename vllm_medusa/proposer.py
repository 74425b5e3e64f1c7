"""From hidden rows to drafts: what the heads guess, grown into one tree per request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vllm_medusa.config import SETTINGS_KEY, Settings, rank_accuracy_of
from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.checkpoint import load_heads
from vllm_medusa.heads.coupling import Perturb, coupled_candidates
from vllm_medusa.heads.loading import after_loading
from vllm_medusa.heads.model import Candidates, MedusaHeads
from vllm_medusa.heads.parts import TargetPart
from vllm_medusa.heads.target import find_matrices
from vllm_medusa.tree.growth import grow_static
from vllm_medusa.tree.lookup import Expected
from vllm_medusa.tree.mixture import grow_mixture
from vllm_medusa.tree.rejection import draw_children
from vllm_medusa.tree.tensor_growth import grow_trees
from vllm_medusa.tree.tensor_lookup import TensorExpected
from vllm_medusa.tree.tensors import TensorTrees, fill_tree
from vllm_medusa.tree.topology import Tree

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class DrawnTokens:
    """What drawn candidates were drawn from, for B requests.

    Attributes:
        which: bool [B], requests whose candidates were drawn.
        probabilities: float32 [B, K, Vd], of every head over the draft vocabulary, at the request's temperature.
        token_map: int64 [Vd], token of each place of the draft vocabulary; None if it is the target's own.
    """

    which: npt.NDArray[np.bool_]
    probabilities: Tensor
    token_map: Tensor | None


@dataclass(frozen=True)
class TreeDraft:
    """Drafts for B requests, at most N nodes each, in the order in which nodes are likely to be reached.

    Attributes:
        tokens: int64 [B, N], token of each node.
        parents: int64 [B, N], row of each node's parent (0 = root); -1 beyond `sizes`.
        ranks: int64 [B, N], which of its head's R candidates a node is; R: none of them, the text expects it.
        reach: float32 [B, N], probability that the walk gets to the node.
        sizes: int64 [B], nodes of each request.
        drawn: what candidates were drawn from, where some were.
        lookup_reach: float32 [B, L], `reach` of the nodes there would be without the heads; None: they were not asked.
    """

    tokens: Ints
    parents: Ints
    ranks: Ints
    reach: Floats
    sizes: Ints
    drawn: DrawnTokens | None = None
    lookup_reach: Floats | None = None


class MedusaProposer:
    """Heads and tree settings of one engine; the class that the host's `custom_class` method builds.

    Attributes:
        part_of: what this process has of a target that it does not hold plain and whole, else None; set by the host.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Read our settings from the host's config (any object with `additional_config`)."""
        self.settings = Settings(**vllm_config.additional_config[SETTINGS_KEY])
        self.fixed_tree = self.settings.fixed_tree
        self.heads: MedusaHeads | None = None
        self._target: nn.Module | None = None
        self._are_weights_new = False
        self.part_of: Callable[[nn.Module], TargetPart | None] = lambda target_model: None

    def load_model(self, target_model: nn.Module) -> None:
        """Load the heads and tie them to the target's unembedding and embedding.

        Raises:
            MedusaError: the target keeps no plain `lm_head` and token embedding to share.
        """
        heads = load_heads(self.settings.heads, draft_vocab=self.settings.draft_vocab)
        self.heads = self._tie(heads, target_model).eval()
        if self._target is not target_model:
            after_loading(target_model, self.weights_changed)
        after_loading(heads, self.weights_changed)
        self._target = target_model
        if self.settings.draft_sample_method == "probabilistic":
            accuracy = rank_accuracy_of(heads.config)
            self.drawn_tree = self.fixed_tree or grow_static(accuracy, self.settings.num_speculative_tokens)
            self.drawn_reach = self.drawn_tree.reach(accuracy)

    @property
    def model(self) -> MedusaHeads | None:
        """The heads, by the name under which hosts look for a drafter's weights."""
        return self.heads

    def weights_changed(self) -> None:
        """Weights of the target or of the heads have changed, or will before the next drafts: tie them anew then."""
        self._are_weights_new = True

    def load_again(self) -> None:
        """The heads' weights are lost, not their memory: read them again, into the same tensors."""
        assert self.heads is not None, "load_model comes first"
        self.heads.take_weights(load_heads(self.settings.heads, draft_vocab=self.settings.draft_vocab))
        self.weights_changed()

    def _tie(self, heads: MedusaHeads, target_model: nn.Module) -> MedusaHeads:
        """Heads where the target is, bound to it as it is now."""
        part = self.part_of(target_model)
        if part is not None:
            heads = heads.to(device=part.device, dtype=part.dtype)
            heads.bind_part(part)
        else:
            unembedding, embedding = _matrices(target_model)
            heads = heads.to(device=unembedding.device, dtype=unembedding.dtype)
            heads.bind(unembedding, embedding)
        heads.freeze()
        self._are_weights_new = False
        return heads

    def _current(self) -> MedusaHeads:
        """The heads, tied to the target's weights of this moment."""
        assert self.heads is not None, "load_model comes first"
        if self._are_weights_new:
            assert self._target is not None
            self._tie(self.heads, self._target)
        return self.heads

    @torch.inference_mode()
    def propose(
        self,
        hidden: Tensor,
        roots: Tensor,
        temperatures: Tensor | None = None,
        generators: Mapping[int, torch.Generator] | None = None,
        expected: Expected | None = None,
    ) -> TreeDraft:
        """Draft a tree for each request.

        Args:
            hidden: [B, H], the target's hidden row (after the final norm) that produced each root token.
            roots: int64 [B], the root tokens: the last ones emitted.
            temperatures: float32 [B], at which to draw candidates; 0 takes the likeliest. None: 0 for all.
            generators: of seeded requests, by row, to draw with.
            expected: what the requests' own texts expect next; joins trees that are grown.
        """
        heads = self._current()
        candidates = heads.candidates(hidden, roots, self.top_k)
        nodes = self.settings.num_speculative_tokens
        expected = expected or Expected.nothing(len(roots))
        if self.fixed_tree is None:
            tokens, probabilities = candidates.tokens.cpu().numpy(), candidates.probabilities.cpu().numpy()
            draft = TreeDraft(*grow_mixture(tokens, probabilities, expected, nodes), lookup_reach=expected.reach)
        else:
            draft = replace(self._fill(self.fixed_tree, candidates), lookup_reach=expected.reach)
        if temperatures is None or not bool((temperatures > 0).any()):
            return draft
        return self._draw(draft, heads(hidden, roots), temperatures, generators or {})

    def from_texts(self, expected: Expected) -> TreeDraft:
        """Draft what the requests' own texts expect next, without asking the heads: chains."""
        batch, width = expected.tokens.shape
        sizes = (expected.tokens >= 0).sum(axis=1)
        parents = np.where(expected.tokens >= 0, np.arange(width), -1)
        ranks = np.full((batch, width), self.top_k)
        return TreeDraft(expected.tokens, parents, ranks, expected.reach, sizes)

    @torch.inference_mode()
    def propose_tensors(
        self,
        hidden: Tensor,
        roots: Tensor,
        expected: TensorExpected | None = None,
        temperatures: Tensor | None = None,
        perturb: Perturb | None = None,
    ) -> TensorTrees:
        """As `propose`, for a host that keeps drafts on the device: all nodes, without waiting.

        Args:
            hidden, roots: as in `propose`.
            expected: what the requests' own texts expect next; joins trees that are grown. None: the heads alone.
            temperatures, perturb: as in `coupled_candidates`, the target's noise; None: the likeliest candidates.
        """
        heads = self._current()
        if temperatures is None or perturb is None:
            tokens, probabilities = heads.candidates(hidden, roots, self.top_k)
        else:
            tokens, probabilities = coupled_candidates(heads, hidden, roots, self.top_k, temperatures, perturb)
        nodes = self.settings.num_speculative_tokens
        if self.fixed_tree is None:
            return grow_trees(tokens, probabilities, nodes, expected)
        return fill_tree(self.fixed_tree, tokens, probabilities, nodes)

    @property
    def max_depth(self) -> int:
        """The most draft tokens one step can accept, if the text is not asked."""
        assert self.heads is not None, "load_model comes first"
        return self.heads.config.num_heads if self.fixed_tree is None else self.fixed_tree.max_depth

    @property
    def top_k(self) -> int:
        """R, candidates of each head."""
        assert self.heads is not None, "load_model comes first"
        return self.heads.config.top_k

    def _fill(self, tree: Tree, candidates: Candidates) -> TreeDraft:
        batch = candidates.tokens.shape[0]
        parents, ranks = np.array(tree.parents, dtype=np.int64), np.array(tree.ranks, dtype=np.int64)
        head = np.array(tree.depths[1:], dtype=np.int64) - 1
        tokens = candidates.tokens.cpu().numpy()[:, head, ranks]
        own = candidates.probabilities.float().cpu().numpy()[:, head, ranks]
        reach = np.ones((batch, tree.num_rows), dtype=np.float32)
        for depth in range(1, tree.max_depth + 1):
            nodes = np.flatnonzero(head == depth - 1)
            reach[:, nodes + 1] = reach[:, parents[nodes]] * own[:, nodes]
        shape = (batch, tree.num_nodes)
        return TreeDraft(
            tokens=tokens,
            parents=np.broadcast_to(parents, shape).copy(),
            ranks=np.broadcast_to(ranks, shape).copy(),
            reach=reach[:, 1:],
            sizes=np.full(batch, tree.num_nodes, dtype=np.int64),
        )

    def _draw(
        self, draft: TreeDraft, logits: Tensor, temperatures: Tensor, generators: Mapping[int, torch.Generator]
    ) -> TreeDraft:
        """The same drafts, with drawn candidates wherever the temperature is not 0.

        The tree's shape, and the `reach` by which it is cut, know nothing of the tokens drawn: a node that is kept
        because of its token would not be a draw any more.
        """
        assert self.heads is not None
        tree, token_map = self.drawn_tree, self.heads.token_map
        which = (temperatures > 0).cpu().numpy()
        scale = temperatures.clamp(min=1e-5)[:, None, None]
        scores = (logits.float() / scale)[torch.from_numpy(which)].log_softmax(dim=-1)
        tokens = np.full((len(scores), tree.num_nodes), -1, dtype=np.int64)
        seeded = {place: generators[row] for place, row in enumerate(np.flatnonzero(which)) if row in generators}
        for row in range(tree.num_rows):
            children = [child - 1 for child in tree.children(row)]
            if children:
                own = scores[:, tree.depths[row]]
                uniforms = torch.rand_like(own)
                for place, generator in seeded.items():
                    uniforms[place] = torch.rand(own.shape[1], generator=generator)
                places = draw_children(own, len(children), uniforms)
                tokens[:, children] = (places if token_map is None else token_map[places]).cpu().numpy()
        width = max(draft.tokens.shape[1], tree.num_nodes)
        merged = _widen(draft, width)
        merged.tokens[which, : tree.num_nodes] = tokens
        for name, values in (("parents", tree.parents), ("ranks", tree.ranks), ("reach", self.drawn_reach)):
            getattr(merged, name)[which, : tree.num_nodes] = values
        merged.parents[which, tree.num_nodes :] = -1
        merged.sizes[which] = tree.num_nodes
        probabilities = torch.zeros(len(which), *scores.shape[1:])
        probabilities[torch.from_numpy(which)] = scores.exp()
        return replace(merged, drawn=DrawnTokens(which, probabilities, token_map))


def _widen(draft: TreeDraft, width: int) -> TreeDraft:
    """The same drafts in arrays of their own, `width` nodes wide."""

    def wider(values: npt.NDArray[Any], fill: float) -> npt.NDArray[Any]:
        return np.pad(values, ((0, 0), (0, width - values.shape[1])), constant_values=fill)

    return TreeDraft(
        tokens=wider(draft.tokens, -1),
        parents=wider(draft.parents, -1),
        ranks=wider(draft.ranks, 0),
        reach=wider(draft.reach, 0.0),
        sizes=draft.sizes.copy(),
    )


def _matrices(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Unembedding and embedding [V, H] of a target; either stands in for the other where there is but one."""
    unembedding, embedding = (_weight(module) for module in shared_modules(model))
    embedding = unembedding if embedding is None else embedding
    unembedding = embedding if unembedding is None else unembedding
    if unembedding is None or embedding is None:
        raise MedusaError.of(
            "model", type(model).__name__, "the target has neither lm_head nor embed_tokens with plain weights"
        )
    return unembedding, embedding


def _weight(module: Any) -> Tensor | None:
    """The weight [V, H] of a module, without the host's padding; None: it has no plain one."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        return None
    # The host pads its rows to a multiple of 64; behind the model's own vocabulary there is nothing to guess.
    return weight.data[: getattr(module, "org_vocab_size", None)]


def shared_modules(model: nn.Module) -> tuple[Any, Any]:
    """The modules of a target that are its unembedding and its token embedding, without what adapters wrap them in.

    None: there is none. Found as in the target's files (`find_matrices`).
    """
    modules = {name: getattr(found, "base_layer", found) for name, found in model.named_modules(remove_duplicate=False)}
    # Whatever multiplies: a quantized layer may have no `weight`, a block around layers has no method of its own.
    layers = {
        name: module
        for name, module in modules.items()
        if hasattr(module, "quant_method") or isinstance(getattr(module, "weight", None), Tensor)
    }
    unembedding, embedding = find_matrices(layers)
    return layers.get(unembedding or ""), layers.get(embedding or "")
