"""Choose a tree by hand: several trees on a few prompts, a table, and the quickest fixed one drawn.

    python examples/choose_tree.py [--model MODEL --heads HEADS] [TREE ...]

A TREE is a list of Medusa choices such as '[[0], [1], [0, 0]]' (each path names the candidate to take from head 1,
head 2, ...), or a kind and a number of nodes: chain-4, static-8, dynamic-16. Without any: a selection. Without a model:
SmolLM2-135M-Instruct (fetched once) and the heads that ship with vllm-medusa. A minute or two a tree on two cores.

Dynamic trees also hold what a text repeats, fixed ones do not. Look at the accepted length first: it is the same every
time. Tokens per second are not where other work shares the machine; engines run one after the other here, while
`vllm-medusa bench` alternates them with plain vLLM. Threads: see docs/tuning.md.
"""

import argparse
import json
import os
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_medusa.bench.demo import demo_datasets
from vllm_medusa.config import rank_accuracy_of
from vllm_medusa.defaults import resolve
from vllm_medusa.heads.checkpoint import read_config
from vllm_medusa.inspection import chosen_tree, labels
from vllm_medusa.tree.drawing import draw

BY_HAND = "[[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]]"
TREES = ["chain-4", "static-4", "static-8", "static-16", "static-32", BY_HAND, "dynamic-8", "dynamic-16", "dynamic-32"]


def settings(tree: str) -> dict[str, Any]:
    """The keys of speculative_config for a TREE. Not adaptive: each tree is to be drafted whole, every time."""
    if tree.startswith("["):
        return {"tree": json.loads(tree), "adaptive": False}
    kind, _, nodes = tree.rpartition("-")
    return {"tree": kind, "num_speculative_tokens": int(nodes), "adaptive": False}


def measure(tree: str, model: str, heads: str, asked: argparse.Namespace) -> dict[str, float]:
    """Answer the prompts one at a time with this tree."""
    from vllm import LLM, SamplingParams  # here, so that --help and mistakes answer at once

    llm = LLM(
        model,
        speculative_config={"method": "medusa", "model": heads, **settings(tree)},
        max_model_len=2048,
        max_num_seqs=1,
        enforce_eager=asked.enforce_eager,
    )
    prompts = [prompt for dataset in demo_datasets() for prompt in dataset.prompts][: asked.prompts]
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    llm.chat(conversations[0], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)  # warm up
    llm.collective_rpc("medusa_report", kwargs={"reset": True})
    began = time.perf_counter()
    answers = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=asked.max_tokens), use_tqdm=False)
    seconds = time.perf_counter() - began
    (report,) = llm.collective_rpc("medusa_report")
    llm.llm_engine.engine_core.shutdown()  # the next engine wants the memory
    return {
        "nodes": report["drafted_nodes"] / max(1, report["request_steps"]),
        "accepted": report["mean_accepted_length"],
        "tokens/s": sum(len(answer.outputs[0].token_ids) for answer in answers) / seconds,
    }


def known(tree: str) -> str:
    """A TREE as it was typed, if it is one."""
    try:
        settings(tree)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{tree!r}: give Medusa choices, or chain-4, static-8, dynamic-16") from None
    return tree


def main() -> None:
    """Measure each tree, print the table, draw the quickest fixed one."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("trees", nargs="*", type=known, metavar="TREE", default=TREES)
    parser.add_argument("--model")
    parser.add_argument("--heads")
    parser.add_argument("--prompts", type=int, default=9, help="how many of the demo's nine")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--enforce-eager", action="store_true", help="do not compile the model")
    asked = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # the table, not vLLM's log
    chosen = resolve(asked.model, asked.heads)
    found = {tree: measure(tree, chosen.model, chosen.heads, asked) for tree in asked.trees}

    console = Console(highlight=False, markup=False)
    quickest = max(found, key=lambda tree: found[tree]["tokens/s"])
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("tree", overflow="fold")
    for column in ("nodes", "accepted", "tokens/s"):
        table.add_column(column, justify="right")
    for tree, row in found.items():
        cells = f"{row['nodes']:.1f}", f"{row['accepted']:.2f}", f"{row['tokens/s']:.1f}"
        table.add_row(tree, *cells, style="bold" if tree == quickest else "")
    console.print(table)

    fixed = [tree for tree in found if not tree.startswith("dynamic")]
    if fixed:
        name = max(fixed, key=lambda tree: found[tree]["tokens/s"])
        given, config = settings(name), read_config(chosen.heads)
        kind = given["tree"] if isinstance(given["tree"], str) else json.dumps(given["tree"])
        drawn = chosen_tree(config, kind, given.get("num_speculative_tokens"))
        console.print(f"\nThe quickest fixed tree, {name}; 2.1 is head 2's candidate 1, with its chance to be reached:")
        console.print(draw(drawn, labels(drawn), reach=drawn.reach(rank_accuracy_of(config))))
    serving = {"method": "medusa", "model": chosen.heads, **settings(quickest)}
    console.print(f"\nThe quickest, to be served with --speculative-config: {json.dumps(serving)}", soft_wrap=True)


if __name__ == "__main__":  # vLLM starts its engine in a new process, which imports this file
    main()
