"""The model card of trained heads: what they are, what they learnt from, how good they are, as measured."""

from typing import Any

from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.training.replay import PLACE_NODES, PLACES
from vllm_medusa.training.served import NODES, Comparison

_RANKS = (1, 2, 3, 5, 10)
_UNEMBEDDING = {
    "target": "share the target's own unembedding",
    "shared": "bring one unembedding for all heads, learnt from the target's",
    "per_head": "bring one unembedding for each head, learnt from the target's",
}


def model_card(config: HeadsConfig, notes: str = "") -> str:
    """README.md for heads with calibration and training facts (see run.py for the facts' names).

    Args:
        config: the heads' config.
        notes: Markdown put behind the measured tables, for instance what was tried.
    """
    facts = config.training or {}
    size = f"{config.draft_vocab_size} of {config.vocab_size}" if config.draft_vocab_size else str(config.vocab_size)
    parts = [
        _front_matter(config),
        f"# Medusa heads for {config.base_model}",
        f"{_kind(config)}, for use with vllm-medusa: "
        f'`--speculative-config \'{{"method": "medusa", "model": "…"}}\'`. They guess {size} tokens '
        f"and {_UNEMBEDDING[config.unembedding]}. The output of the target does not change, only its speed.",
        "## How they were made",
        _training(facts),
        "## How good they are",
        _accuracy(config),
        _replay(facts),
        _places(facts),
        _served(facts),
        notes.strip(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(config: HeadsConfig) -> str:
    return f"---\nlicense: apache-2.0\nbase_model: {config.base_model}\ntags: [medusa, speculative-decoding, vllm]\n---"


def _kind(config: HeadsConfig) -> str:
    """What sort of heads, in words."""
    shape = [f"{config.num_heads} {'root-conditioned' if config.root_conditioned else 'plain'} heads"]
    if config.trunk_size is not None:
        shape.append(f"on a shared layer of {config.trunk_size} features")
    if config.num_layers:
        shape.append(f"of {config.num_layers} residual block{'s' if config.num_layers > 1 else ''} each")
    return " ".join(shape)


def _training(facts: dict[str, Any]) -> str:
    rows = [(name.replace("_", " "), value) for name, value in facts.items() if not isinstance(value, dict | list)]
    table = ["| | |", "| --- | --- |"] + [f"| {name} | {value} |" for name, value in rows]
    lesson = {
        "ce": "the tokens that followed",
        "kl": "the target's own distribution of the tokens that followed",
        "mixed": "half the tokens that followed, half the target's own distribution of them",
    }[facts.get("loss", "ce")]
    invented = f" ({facts['self_prompts']} of them it had invented itself)" if facts.get("self_prompts") else ""
    temperatures = " and ".join(facts.get("training_tokens_by_temperature", {"at temperature 0": 0}))
    about = (
        f"Self-distillation (Medusa-1): the target answered prompts{invented} {temperatures} through vLLM, its hidden "
        f"rows were recorded while it did, and the heads learnt {lesson}; the target stayed frozen."
    )
    return about + "\n\n" + "\n".join(table)


def _accuracy(config: HeadsConfig) -> str:
    calibration = config.calibration
    if calibration is None:
        return ""
    ranks = [rank for rank in _RANKS if rank <= config.top_k]
    lines = [f"| head | {' | '.join(f'top {rank}' for rank in ranks)} | temperature | ECE before | after |"]
    lines.append("| --- " * (len(ranks) + 4) + "|")
    for head, accuracy in enumerate(calibration.rank_accuracy):
        tops = " | ".join(f"{sum(accuracy[:rank]):.3f}" for rank in ranks)
        before = calibration.ece_before[head] if calibration.ece_before else float("nan")
        after = calibration.ece_after[head] if calibration.ece_after else float("nan")
        lines.append(f"| {head + 1} | {tops} | {calibration.temperatures[head]:.2f} | {before:.4f} | {after:.4f} |")
    about = (
        f"On {calibration.rows} rows of answers to held-out prompts: how often the right token is among a head's first "
        "candidates (a token outside the draft vocabulary is a miss), and the expected calibration error (ECE) of the "
        "candidates' probabilities without and with the fitted temperature."
    )
    return about + "\n\n" + "\n".join(lines)


def _replay(facts: dict[str, Any]) -> str:
    lengths: dict[str, dict[str, float]] = facts.get("accepted_length", {})
    if not lengths:
        return ""
    kinds = list(next(iter(lengths.values())))
    lines = [f"| answers to | {' | '.join(kinds)} |", "| --- " * (len(kinds) + 1) + "|"]
    for name, row in lengths.items():
        lines.append(f"| {name} | {' | '.join(f'{row[kind]:.2f}' for kind in kinds)} |")
    about = "Mean accepted length, tokens per step with the bonus token counted, from replayed greedy answers:"
    return about + "\n\n" + "\n".join(lines)


def _places(facts: dict[str, Any]) -> str:
    """Whether heads decline with the length of answers."""
    found: dict[str, dict[str, float]] = facts.get("accepted_length_by_place", {})
    known = [name for name in PLACES if any(name in row for row in found.values())]
    if len(known) < 2:
        return ""
    lines = [f"| answers to | {' | '.join(known)} |", "| --- " * (len(known) + 1) + "|"]
    for name, row in found.items():
        lines.append(f"| {name} | {' | '.join(f'{row[place]:.2f}' if place in row else '' for place in known)} |")
    about = f"The same by place in the answer, in tokens (dynamic trees of {PLACE_NODES} nodes):"
    return about + "\n\n" + "\n".join(lines)


def _served(facts: dict[str, Any]) -> str:
    """What serving brought of what the replay promises."""
    served: dict[str, Any] = facts.get("served", {})
    if not served:
        return ""
    if "failed" in served:
        return f"Not compared with serving: {served['failed']}."
    found = Comparison(**served)
    return f"Served with dynamic trees of {NODES} nodes, by the heads alone: {found.in_words()}."
