"""Train Medusa heads for a small model, tiny and quick: it answers a few prompts, heads learn from that and are saved.

    python examples/train_heads.py [MODEL [OUT]]

MODEL is a folder or hub id of a decoder-only model, OUT a folder to write (default: out/tiny-heads). Without arguments:
SmolLM2-135M-Instruct (fetched once). Some minutes on two cores. Heads worth serving take more prompts, more tokens and
`vllm-medusa train`: see docs/training.md.
"""

import json
import sys
from itertools import product
from pathlib import Path

from rich.console import Console

from vllm_medusa.defaults import default_model
from vllm_medusa.heads.checkpoint import read_config
from vllm_medusa.training.answering import AnswerOptions
from vllm_medusa.training.loop import LoopOptions
from vllm_medusa.training.options import TrainOptions
from vllm_medusa.training.run import train

# Use what your users ask instead: heads learn how *this* model answers *such* prompts.
TASKS = ["Explain {} in two sentences.", "Name three facts about {}.", "Write a short story about {}."]
THINGS = ["the sea", "bread", "a bicycle", "the moon", "a school", "rain", "a river", "music", "iron", "an old map"]
THINGS += ["the heart", "tea", "a lighthouse", "snow", "chess", "a forest", "glass", "the wind", "a market", "sleep"]


def main() -> None:
    """Train, and say how many tokens a step would bring."""
    model = sys.argv[1] if len(sys.argv) > 1 else default_model()
    out = Path(sys.argv[2] if len(sys.argv) > 2 else "out/tiny-heads")
    prompts = out.with_name(f"{out.name}-prompts.jsonl")
    prompts.parent.mkdir(parents=True, exist_ok=True)
    prompts.write_text(
        "".join(json.dumps({"prompt": task.format(thing)}) + "\n" for thing, task in product(THINGS, TASKS))
    )
    options = TrainOptions(
        model=model,
        prompts=prompts,
        out=out,
        held_out=12,  # never learnt from: accuracy and temperatures are measured on their answers
        num_heads=3,
        trunk_size=256,
        draft_vocab_size=2048,
        answers=AnswerOptions(max_new_tokens=64, max_model_len=512, batch_size=32, enforce_eager=True),
        loop=LoopOptions(epochs=4, batch_size=64),
    )
    train(options, Console())

    facts = read_config(out).training or {}
    lengths = facts["accepted_length"]["held-out prompts"]
    print(
        f"Learnt from {facts['training_tokens']} tokens. On {facts['held_out_prompts']} answers not learnt from, a step"
    )
    print(f"would bring {lengths['dynamic-8']:.2f} tokens with trees of 8 nodes, {lengths['dynamic-63']:.2f} with 63.")
    settings = json.dumps({"method": "medusa", "model": str(out)})
    print(f"Serve them: vllm serve {model} --speculative-config '{settings}'")


if __name__ == "__main__":  # vLLM starts its engine in a new process, which imports this file
    main()
