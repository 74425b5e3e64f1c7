"""The `vllm-medusa` command. What a command needs is imported when it runs, so that `--help` answers at once."""

import typer

from vllm_medusa.commands.bench import bench
from vllm_medusa.commands.calibrate import calibrate
from vllm_medusa.commands.convert import convert
from vllm_medusa.commands.demo import demo
from vllm_medusa.commands.doctor import doctor
from vllm_medusa.commands.engine_options import SETTINGS, EngineCommand
from vllm_medusa.commands.inspect import inspect
from vllm_medusa.commands.page import PageCommand, PageGroup
from vllm_medusa.commands.train import train

app = typer.Typer(
    cls=PageGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Medusa speculative decoding for vLLM: a tree of guesses is checked in one pass, the same tokens come sooner.",
)
for command in (demo, bench, train, calibrate, convert, inspect, doctor):
    takes_vllms = command in (train, calibrate)
    kind = EngineCommand if takes_vllms else PageCommand
    app.command(cls=kind, context_settings=SETTINGS if takes_vllms else None)(command)

if __name__ == "__main__":
    app()
