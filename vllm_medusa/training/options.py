"""What `train` is asked for."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vllm_medusa.errors import MedusaError
from vllm_medusa.training.answering import AnswerOptions
from vllm_medusa.training.step import LoopOptions


@dataclass(frozen=True)
class TrainOptions:
    """Everything `train` is asked for.

    Attributes:
        model: the target, a folder or hub id.
        prompts: JSON lines with `prompt` or `turns`, answered in the target's chat template.
        out: folder of the heads, written at the end.
        texts: in place of `prompts`, JSON lines with `text`: plain documents, whose first `text_tokens` tokens the
            target goes on from without a chat template.
        self_prompts: prompts that the target invents itself, behind those of `prompts`, or alone.
        evaluate: files of prompts whose first `evaluate_prompts` are answered greedily too, never learnt from, and
            replayed when the heads are done.
        notes: Markdown for the end of the model card.
        work: where recorded rows are kept, so that a killed run goes on; None: beside `out`, as NAME-rows.
        base_model: the target's public name, for the card; None: its hub id, or the folder's name.
        held_out: the first prompts (or texts) are kept for calibration and answered greedily.
        max_tokens: answer tokens to learn from; fewer if the prompts end before, at every temperature.
        keep_rows: rows that lie on disk at one time: answering and training take turns, in one pass; None: all.
        num_layers: residual blocks per head; None: none behind a trunk, else two.
        trunk_size: width of the layer that root-conditioned heads share; None: none.
        unembedding: "target" shares the target's, frozen; "shared" learns one for all heads, "per_head" one for each,
            both beginning as the target's.
        compare_served: serve the heads at the end and hold what they bring against their replay.
        push_to_hub: a repository, ORG/NAME, into which the heads are put at the end; None: none.
        draft_vocab_size: tokens the heads can guess, the most frequent ones of the answers; None: all.
    """

    model: str
    prompts: Path | None
    out: Path
    texts: Path | None = None
    text_tokens: int = 64
    self_prompts: int = 0
    evaluate: tuple[Path, ...] = ()
    evaluate_prompts: int = 40
    evaluate_tokens: int = 128
    notes: Path | None = None
    work: Path | None = None
    base_model: str | None = None
    held_out: int = 128
    max_tokens: int = 2_000_000
    keep_rows: int | None = None
    num_heads: int = 4
    num_layers: int | None = None
    root_conditioned: bool = True
    trunk_size: int | None = 1152
    unembedding: Literal["target", "shared", "per_head"] = "target"
    draft_vocab_size: int | None = 8192
    compare_served: bool = False
    push_to_hub: str | None = None
    answers: AnswerOptions = field(default_factory=AnswerOptions)
    loop: LoopOptions = field(default_factory=LoopOptions)

    @property
    def trunk(self) -> int | None:
        """Width of the heads' trunk: plain heads have none."""
        return self.trunk_size if self.root_conditioned else None

    @property
    def blocks(self) -> int:
        """Residual blocks per head."""
        if self.num_layers is not None:
            return self.num_layers
        return 2 if self.trunk is None else 0

    @property
    def rows_folder(self) -> Path:
        """Where recorded rows lie."""
        return self.work or self.out.with_name(self.out.name + "-rows")


def parse_temperatures(text: str) -> tuple[float, ...]:
    """Temperatures in the order in which the prompts are answered at them.

    >>> parse_temperatures("0, 0.7")
    (0.0, 0.7)
    """
    fix = "give numbers from 0 to 5 that differ, with commas between them, such as 0,0.7"
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise MedusaError.of("temperatures", text, fix) from None
    if not all(0.0 <= temperature <= 5.0 for temperature in found) or len(set(found)) != len(found):
        raise MedusaError.of("temperatures", text, fix)
    return found
