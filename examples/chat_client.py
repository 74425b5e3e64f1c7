"""Ask the server of examples/serve.sh and print the answer as it comes.

python examples/chat_client.py [--port 8000] [QUESTION]
"""

import argparse

from openai import OpenAI


def main() -> None:
    """One question, streamed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("question", nargs="?", default="Why is the sea salty? Answer in two sentences.")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()

    client = OpenAI(base_url=f"http://127.0.0.1:{arguments.port}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="model",
        messages=[{"role": "user", "content": arguments.question}],
        max_tokens=128,
        temperature=0.0,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
