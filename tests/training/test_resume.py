"""A training run that is killed, by SIGKILL and anywhere, ends in the same heads as one that was not, bit for bit."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.training.hidden import HiddenRows
from vllm_medusa.training.loop import train_heads
from vllm_medusa.training.snapshot import Snapshots, run_name
from vllm_medusa.training.step import LoopOptions, Progress

LONG = pytest.mark.skipif(not os.environ.get("MEDUSA_LONG"), reason="many runs")
# The whole of `train` on a toy target. Answers come from a stand-in for vLLM; each event is printed as it happens.
SCRIPT = """
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from vllm_medusa.training import data, recorded, run, snapshot, step
from vllm_medusa.training.answering import AnswerOptions
from vllm_medusa.training.hidden import RowWriter
from vllm_medusa.training.step import LoopOptions
from vllm_medusa.training.options import TrainOptions

root, loss, keep = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
target = torch.randn(24, 16, generator=torch.Generator().manual_seed(5))


class Target:
    def collective_rpc(self, method, kwargs=None):
        if method == "start_recording":
            self.folder = Path(kwargs["folder"])
        return [self.names] if method == "finish_recording" else [None]

    def generate(self, prompts, params, use_tqdm):
        writer, outputs = RowWriter(self.folder, 16), []
        for number, (prompt, param) in enumerate(zip(prompts, params)):
            noise = torch.Generator().manual_seed(param.seed)
            tokens = [(prompt["prompt_token_ids"][0] + 3 * i) % 24 for i in range(12)]
            rows = target[torch.tensor(tokens)] + 0.1 * torch.randn(12, 16, generator=noise)
            writer.append([number] * 12, list(range(12)), tokens, rows)
            outputs.append(SimpleNamespace(request_id=str(number), outputs=[SimpleNamespace(token_ids=tokens)]))
            print("answer", flush=True)
        self.names = [output.request_id for output in outputs]
        writer.close()
        return outputs


sys.modules["vllm"] = SimpleNamespace(SamplingParams=SimpleNamespace)
data.AnsweringEngine.llm = Target()
recorded.open_chat = lambda _: SimpleNamespace(ask=lambda prompt, said=(): None if said else [int(prompt.key)])
run.Snapshots = partial(snapshot.Snapshots, seconds=0.0)  # one at every step
real = step.Run.step


def told(self, chosen):
    real(self, chosen)
    print("step", self.progress.step, flush=True)
    lying = sum(file.stat().st_size for file in root.glob("heads-rows/answers/*/hidden.bin")) // 32
    print("lying", lying, os.getpid(), flush=True)


step.Run.step = told
calibrate = run.calibrate


def calibrating(*arguments):
    print("calibrating", flush=True)
    return calibrate(*arguments)


run.calibrate = calibrating
run.train(
    TrainOptions(
        str(root / "model"), root / "prompts.jsonl", root / "heads", held_out=20, num_heads=2,
        num_layers=1, trunk_size=24, draft_vocab_size=20, keep_rows=keep or None,
        answers=AnswerOptions(max_new_tokens=12, shard_size=16, temperatures=(0.0, 0.7)),
        loop=LoopOptions(epochs=1 if keep else 3, batch_size=64 if keep else 128, loss=loss),
    )
)
"""


def start(root: Path, loss: str, keep: int = 0, ranks: int = 1) -> subprocess.Popen[str]:
    script = root / "script.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, str(script), str(root), loss, str(keep)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_to_the_end(root: Path, loss: str, keep: int = 0, ranks: int = 1) -> tuple[dict[str, torch.Tensor], list[str]]:
    with start(root, loss, keep, ranks) as process:
        out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    return load_file(root / "heads" / "model.safetensors"), out.splitlines()


def kill_at(root: Path, loss: str, event: str, count: int, keep: int = 0) -> list[str]:
    """Kill the run when `event` has come `count` times; returns the lines seen."""
    seen: list[str] = []
    with start(root, loss, keep) as process:
        assert process.stdout is not None
        for line in process.stdout:
            seen.append(line.strip())
            if sum(entry.startswith(event) for entry in seen) == count:
                process.send_signal(signal.SIGKILL)
                break
        process.wait(timeout=60)
    assert process.returncode == -signal.SIGKILL
    return seen


def prepare(root: Path) -> Path:
    from safetensors.torch import save_file

    (root / "model").mkdir(parents=True)
    target = torch.randn(24, 16, generator=torch.Generator().manual_seed(5))
    save_file({"model.embed_tokens.weight": target}, root / "model" / "model.safetensors")
    (root / "prompts.jsonl").write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(80)))
    return root


@pytest.mark.slow
def test_a_killed_run_ends_like_an_unbroken_one(tmp_path: Path) -> None:
    loss = "mixed"
    unbroken, whole = run_to_the_end(prepare(tmp_path / "unbroken"), loss)
    root = prepare(tmp_path / "killed")
    kill_at(root, loss, "answer", 50)  # in the middle of a shard
    kill_at(root, loss, "step", 4)
    kill_at(root, loss, "step", 15)  # in a later epoch
    killed, last = run_to_the_end(root, loss)
    assert killed.keys() == unbroken.keys()
    for name, tensor in unbroken.items():
        assert torch.equal(tensor, killed[name]), name
    # It went on, instead of beginning again: what was finished was not made a second time.
    assert whole.count("answer") == 20 + 2 * 60 and "answer" not in last
    first_step = next(line for line in last if line.startswith("step"))
    assert 15 <= int(first_step.split()[1]) <= 20
    assert not list((root / "heads-rows").glob("run-*"))  # nothing is left of the run but its rows


@pytest.mark.slow
def test_rows_may_lie_on_disk_for_a_while_only(tmp_path: Path) -> None:
    """Answering and training by turns: no more rows than are kept; killed anywhere, the same heads, bit for bit."""
    keep = 200  # of 1,440 rows
    unbroken, whole = run_to_the_end(prepare(tmp_path / "unbroken"), "mixed", keep)
    lying = [int(line.split()[1]) for line in whole if line.startswith("lying")]
    assert 100 < max(lying) <= keep, "about as many as are allowed"
    assert whole.count("answer") == 20 + 2 * 60
    turns = [line.split()[0] for line in whole if not line.startswith("lying")]
    assert "answer" in turns[turns.index("step") :], "it learns before all is answered"
    root = prepare(tmp_path / "killed")
    seen: list[str] = []
    for event, count in (("step", 5), ("answer", 10), ("calibrating", 1)):
        seen += kill_at(root, "mixed", event, count, keep)
    killed, last = run_to_the_end(root, "mixed", keep)
    assert not any(line.startswith(("answer", "step")) for line in last), "killed behind its last step"
    assert killed.keys() == unbroken.keys()
    for name, tensor in unbroken.items():
        assert torch.equal(tensor, killed[name]), name
    assert (seen + last).count("answer") < 20 + 2 * 60 + 5 * 20, "what was finished was not made again"
    # What is gone is not missed silently.
    with start(root, "mixed", 0) as process:
        _, error = process.communicate(timeout=120)
    assert process.returncode != 0 and "shard_size" in error


@LONG
@pytest.mark.slow
@pytest.mark.parametrize("keep", [0, 200])
def test_killed_at_twenty_random_places(tmp_path: Path, keep: int) -> None:
    unbroken, whole = run_to_the_end(prepare(tmp_path / "unbroken"), "mixed", keep)
    rng, places = random.Random(keep), 0
    root = prepare(tmp_path / "killed")
    while places < 20:
        with start(root, "mixed", keep) as process:
            assert process.stdout is not None
            left = rng.randrange(1, len(whole) // 6)
            for line in process.stdout:
                left -= not line.startswith("lying")
                if left == 0:
                    time.sleep(rng.random() * 0.01)
                    process.send_signal(signal.SIGKILL)
                    break
            process.wait(timeout=60)
        places += process.returncode == -signal.SIGKILL
        for shard in root.glob("heads-rows/*/shard-????"):
            assert not shard.is_dir() or (shard / "done.json").exists(), "half a shard"
        if process.returncode == 0:  # it came to its end
            same(unbroken, load_file(root / "heads" / "model.safetensors"))
            shutil.rmtree(root)
            prepare(root)
    same(unbroken, run_to_the_end(root, "mixed", keep)[0])


@LONG
@pytest.mark.slow
def test_one_of_two_ranks_is_killed(tmp_path: Path) -> None:
    unbroken, _ = run_to_the_end(prepare(tmp_path / "unbroken"), "mixed", ranks=2)
    root = prepare(tmp_path / "killed")
    for count in (3, 12, 20):
        with start(root, "mixed", ranks=2) as process:
            assert process.stdout is not None
            ranks: list[int] = []
            for line in process.stdout:
                if line.startswith("lying"):
                    ranks.append(int(line.split()[2]))
                if len(ranks) == count:
                    os.kill(ranks[-1], signal.SIGKILL)
                    break
            process.communicate(timeout=120)
        assert process.returncode != 0, "torchrun ends the other one"
    same(unbroken, run_to_the_end(root, "mixed", ranks=2)[0])
    one, _ = run_to_the_end(prepare(tmp_path / "one"), "mixed")
    for name, tensor in one.items():
        if tensor.is_floating_point():
            apart = (tensor.float() - unbroken[name].float()).norm() / tensor.float().norm().clamp(min=1e-6)
            assert apart < 0.05, name


def same(wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        assert torch.equal(tensor, found[name]), name


@pytest.mark.slow
def test_a_run_killed_behind_its_last_step_does_not_train_again(tmp_path: Path) -> None:
    root = prepare(tmp_path)
    kill_at(root, "ce", "calibrating", 1)
    _, last = run_to_the_end(root, "ce")
    assert not any(line.startswith("step") for line in last)


@pytest.mark.parametrize("unembedding", ["shared", "per_head"])
def test_an_unembedding_of_the_heads_own_goes_on_where_it_stood(
    walks: Callable[[int, int], HiddenRows], target: torch.Tensor, tmp_path: Path, unembedding: str
) -> None:
    rows, options = walks(20, 1), LoopOptions(epochs=2, batch_size=32, loss="ce")

    def new() -> MedusaHeads:
        config = {"num_heads": 2, "num_layers": 1, "hidden_size": 16, "vocab_size": 24, "top_k": 5}
        heads = MedusaHeads(HeadsConfig(unembedding=unembedding, **config))  # type: ignore[arg-type]
        assert heads.unembedding is not None
        heads.unembedding.data.copy_(target)
        heads.bind(target, target)
        return heads

    def kill(now: Progress) -> None:
        if now.step == 9:
            raise InterruptedError

    unbroken, killed, resumed = new(), new(), new()
    train_heads(unbroken, rows, options)
    snapshots = Snapshots(tmp_path / "run.pt", seconds=0.0)
    with pytest.raises(InterruptedError):
        train_heads(killed, rows, options, kill, snapshots=snapshots)
    seen: list[int] = []
    train_heads(resumed, rows, options, lambda now: seen.append(now.step), snapshots=snapshots)
    assert seen[0] == 10
    for name, tensor in unbroken.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    moved = unbroken.unembedding
    assert moved is not None and not torch.equal(moved[0], target) and not moved.requires_grad


def test_a_snapshot_is_whole_or_not_there(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path / "deep" / "run.pt")
    assert snapshots.read() is None
    snapshots.keep({"step": 1, "weights": torch.ones(3)})
    (tmp_path / "deep" / "run.pt.partial").write_bytes(b"half a snapsh")  # killed while it wrote the second
    state = snapshots.read()
    assert state is not None and state["step"] == 1 and torch.equal(state["weights"], torch.ones(3))
    snapshots.remove()
    assert not list((tmp_path / "deep").iterdir())


def test_snapshots_come_no_more_often_than_asked(tmp_path: Path) -> None:
    assert not Snapshots(tmp_path / "run.pt", seconds=60.0).due()
    assert Snapshots(tmp_path / "run.pt", seconds=0.0).due()


def test_a_run_is_named_after_all_that_decides_its_result() -> None:
    names = {
        run_name({"seed": seed}, kind, tokens) for seed in (0, 1) for kind in ("a", "b") for tokens in (b"x", b"y")
    }
    assert len(names) == 8
    assert run_name({"a": 1, "b": 2}) == run_name({"b": 2, "a": 1})
