#!/bin/sh
# An OpenAI-compatible server with Medusa trees: examples/serve.sh [PORT [more options of vllm serve]]
# Ask it with examples/chat_client.py. Ctrl-C (or SIGTERM) ends it.
set -eu
cd "$(dirname "$0")/.."
[ -d .venv ] && export PATH="$PWD/.venv/bin:$PATH"
port=${1:-8000}
[ $# -gt 0 ] && shift

# SmolLM2-135M-Instruct, fetched once, and the heads that ship with vllm-medusa; set MODEL and HEADS for your own.
if [ -z "${MODEL:-}" ]; then
  MODEL=$(python -c 'from vllm_medusa.defaults import default_model; print(default_model())')
fi
HEADS=${HEADS:-$(python -c 'from vllm_medusa.defaults import bundled_heads; print(bundled_heads())')}

exec vllm serve "$MODEL" \
  --served-model-name model \
  --host 127.0.0.1 --port "$port" \
  --max-model-len 2048 \
  --speculative-config "{\"method\": \"medusa\", \"model\": \"$HEADS\"}" "$@"
