"""Several prompts in one batch with Medusa trees, offline.

    python examples/offline_batch.py [MODEL HEADS]

Without arguments: SmolLM2-135M-Instruct (fetched once) and the heads that ship with vllm-medusa.
"""

import sys

from vllm import LLM, SamplingParams

from vllm_medusa.defaults import resolve

PROMPTS = [
    "Name three things to see in Lisbon.",
    "Write a Python function that reverses a string.",
    "What is 17 times 6? Explain in one sentence.",
    "Write a two-line poem about the rain.",
]


def main() -> None:
    """Answer the prompts and say how many tokens a step brought."""
    chosen = resolve(*sys.argv[1:3]) if len(sys.argv) >= 3 else resolve(None, None)
    llm = LLM(
        chosen.model,
        speculative_config={"method": "medusa", "model": chosen.heads},
        max_model_len=2048,
    )
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    answers = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=64))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        print(f"\n> {prompt}\n{answer.outputs[0].text.strip()}")
    (report,) = llm.collective_rpc("medusa_report")
    print(f"\nMean accepted length: {report['mean_accepted_length']:.2f} tokens per step and request.")


if __name__ == "__main__":  # vLLM starts its engine in a new process, which imports this file
    main()
