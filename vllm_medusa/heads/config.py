"""What heads are and how far they can be trusted: the config.json beside their weights."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vllm_medusa.errors import MedusaError

FORMAT: Literal["vllm-medusa/1"] = "vllm-medusa/1"
# Vocabularies are padded to multiples of this, for even memory and even shares of it.
_PADDED_TO, _MOST_PADDING = 64, 1024
# What no model comes near: sizes beyond are mistakes, and would overflow what is made from them.
_LARGEST_ROW, _LARGEST_VOCAB = 2**20, 2**24
_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)


def is_padding(first: int, second: int) -> bool:
    """Whether two vocabulary sizes are the same but for padding of the larger one.

    >>> is_padding(32000, 32064), is_padding(32064, 32000), is_padding(32000, 32001), is_padding(32000, 128256)
    (True, True, False, False)
    """
    smaller, larger = sorted((first, second))
    return smaller == larger or (larger % _PADDED_TO == 0 and larger - smaller < _MOST_PADDING)


class Calibration(BaseModel):
    """Measured on answers the heads did not learn from.

    Attributes:
        temperatures: [K], what each head's logits are divided by so that its probabilities mean what they say.
        rank_accuracy: [K][R], how often candidate r of head k is the right token; a token outside the draft
            vocabulary counts as a miss.
        ece_before, ece_after: [K], expected calibration error of the top candidate without and with the temperatures.
        num_speculative_tokens: nodes to draft where the user names no number, by platform ("cpu", "cuda").
        rows: held-out rows these figures stand on.
    """

    model_config = _STRICT

    temperatures: list[float]
    rank_accuracy: list[list[float]]
    num_speculative_tokens: dict[str, int] = {}
    ece_before: list[float] | None = None
    ece_after: list[float] | None = None
    rows: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _in_range(self) -> Self:
        if not all(0.01 <= temperature <= 100.0 for temperature in self.temperatures):
            raise ValueError("temperatures lie between 0.01 and 100; calibrate the heads again")
        if not all(0.0 <= accuracy <= 1.0 for head in self.rank_accuracy for accuracy in head):
            raise ValueError("accuracies in rank_accuracy lie between 0 and 1; calibrate the heads again")
        if not all(1 <= nodes <= 128 for nodes in self.num_speculative_tokens.values()):
            raise ValueError("num_speculative_tokens lies between 1 and 128")
        for name, errors in (("ece_before", self.ece_before), ("ece_after", self.ece_after)):
            if errors is None:
                continue
            if len(errors) != len(self.temperatures) or not all(0.0 <= error <= 1.0 for error in errors):
                raise ValueError(f"{name} holds one error between 0 and 1 per head; calibrate the heads again")
        return self


class HeadsConfig(BaseModel):
    """Shape and origin of a set of heads.

    Attributes:
        num_heads: K; head k (from 0) guesses the token k + 1 places after the root.
        num_layers: residual blocks per head, behind the trunk if there is one.
        hidden_size, vocab_size: of the target, H and V. V is 0 where a checkpoint shares the target's unembedding and
            does not say: then it is the target's, known once the heads are bound.
        root_conditioned: whether the first block also reads the embedding of the root token.
        trunk_size: M, width of a first layer that all heads share (see model.py); None: each head has its own block.
        bias: whether blocks have one.
        unembedding: "target" shares the target's lm_head (the heads store none), "shared" brings one for all heads,
            "per_head" one for each.
        draft_vocab_size: Vd, tokens the heads can guess; None: all V.
        top_k: R, candidates each head offers to trees.
        logit_scale: factor on the logits.
        base_model: the target these heads were trained for, for people to read.
        training: facts for people to read (data, steps, seconds, losses).
    """

    model_config = _STRICT

    model_type: Literal["medusa"] = "medusa"
    format: Literal["vllm-medusa/1"] = FORMAT
    num_heads: int = Field(ge=1, le=32)
    num_layers: int = Field(ge=0, le=16)
    hidden_size: int = Field(ge=1, le=_LARGEST_ROW)
    vocab_size: int = Field(ge=0, le=_LARGEST_VOCAB)
    root_conditioned: bool = False
    trunk_size: int | None = Field(default=None, ge=1, le=_LARGEST_ROW)
    bias: bool = True
    unembedding: Literal["target", "shared", "per_head"] = "target"
    draft_vocab_size: int | None = Field(default=None, ge=1)
    top_k: int = Field(default=10, ge=1, le=128)
    logit_scale: float = Field(default=1.0, ge=1e-6, le=1e6, allow_inf_nan=False)
    base_model: str | None = None
    calibration: Calibration | None = None
    training: dict[str, Any] | None = None

    @property
    def num_outputs(self) -> int:
        """Tokens a head can guess: Vd, or V without a reduced vocabulary; 0 while only the target knows."""
        return self.draft_vocab_size or self.vocab_size

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.vocab_size < 2 and (self.vocab_size or self.unembedding != "target" or self.draft_vocab_size):
            raise ValueError(f"vocab_size {self.vocab_size} is too small; give the target's")
        if self.draft_vocab_size is not None and self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}")
        if self.num_outputs and self.top_k > self.num_outputs:
            raise ValueError(f"top_k {self.top_k} exceeds the {self.num_outputs} tokens the heads can guess")
        if self.trunk_size is not None and not self.root_conditioned:
            raise ValueError("a trunk is for root_conditioned heads only")
        if self.root_conditioned and self.num_layers == 0 and self.trunk_size is None:
            raise ValueError("root_conditioned heads need num_layers of at least 1 or a trunk_size")
        calibration = self.calibration
        if calibration is not None:
            if len(calibration.temperatures) != self.num_heads or len(calibration.rank_accuracy) != self.num_heads:
                raise ValueError(
                    f"calibration must hold one temperature and one rank_accuracy row per head ({self.num_heads})"
                )
            if any(len(row) != self.top_k for row in calibration.rank_accuracy):
                raise ValueError(f"each row of calibration.rank_accuracy must hold top_k={self.top_k} accuracies")
        return self

    @classmethod
    def parse(cls, raw: dict[str, Any], where: str) -> HeadsConfig:
        """Check a config read from `where`.

        Raises:
            MedusaError: an unknown key, a wrong type or a value out of range, by name.
        """
        try:
            return cls(**raw)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"]) or "the values together"
            shown = first["input"] if first["loc"] else "..."
            reason = str(first["msg"]).removeprefix("Value error, ")
            raise MedusaError.of(f"{where}: {key}", shown, f"{reason}; correct it or convert the heads again") from None
