"""What recording hidden rows costs while the target answers: one engine, recording and not by turns.

    python benchmarks/recording_cost.py [--model MODEL] [--batch-size 64] [--tokens 64] [--rounds 5]

Prints one line of JSON: seconds of each round, and the ratio of their medians, on the model runner that vLLM chooses.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from vllm_medusa.defaults import default_model
from vllm_medusa.training.answering import AnsweringEngine, AnswerOptions


def main() -> None:
    """Alternate rounds with and without."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--enforce-eager", action="store_true")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(100, 10_000, 32).tolist()} for _ in range(arguments.batch_size)]
    options = AnswerOptions(batch_size=arguments.batch_size, max_model_len=1024, enforce_eager=arguments.enforce_eager)
    seconds: dict[str, list[float]] = {"plain": [], "recorded": []}
    model = arguments.model or default_model()
    with AnsweringEngine(model, options) as engine, tempfile.TemporaryDirectory() as folder:
        from vllm import SamplingParams

        llm = engine.llm
        params = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)  # what is built on first use
        for number in range(arguments.rounds):
            for name in ("plain", "recorded") if number % 2 else ("recorded", "plain"):
                began = time.monotonic()
                if name == "recorded":
                    llm.collective_rpc("start_recording", kwargs={"folder": str(Path(folder) / str(number))})
                llm.generate(prompts, params, use_tqdm=False)
                if name == "recorded":
                    llm.collective_rpc("finish_recording")
                seconds[name].append(round(time.monotonic() - began, 3))
    ratio = statistics.median(seconds["recorded"]) / statistics.median(seconds["plain"])
    print(json.dumps({**seconds, "recorded_over_plain": round(ratio, 4)}))


if __name__ == "__main__":
    main()
