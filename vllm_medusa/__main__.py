"""`python -m vllm_medusa`: the command line, for launchers such as torchrun."""

from vllm_medusa.cli import app

app()
