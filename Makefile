# Needs Python 3.11+, pip and make. `make demo` and `make test` are all that a newcomer has to know.
PYTHON ?= python3
VENV ?= .venv
# CPU builds of torch and torchvision come from wherever pip looks; where it finds none, from PyTorch's own index, for
# these packages alone.
TORCH ?= torch==2.13.0+cpu
TORCHVISION ?= torchvision==0.28.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# KV by NIXL, without the half of it that is for another CUDA version; where it is not to be had its tests skip.
NIXL ?= nixl==1.5.1 nixl-cu13==1.5.1
ARGS ?=
# Further options of pytest, such as PYTEST_ARGS='-k gateway'.
PYTEST_ARGS ?=
# Two processes, a file of tests in one of them; PYTEST_JOBS= for one process, whose output comes as it is made.
PYTEST_JOBS ?= -n 2 --dist loadfile

# What runs `gpu-check`: `make setup` makes an environment for CPUs.
GPU_PYTHON ?= python3

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup up demo test test-fast test-random gpu-check vllm-check ray-check compose-check pods-check lint ruff clean
.DEFAULT_GOAL := help

help: ## Show this.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## Set everything up in .venv; quick when nothing changed.

# vLLM's dependencies bring CUDA builds of three packages that break `import transformers` beside a CPU torch. Two are
# removed. torchvision's CPU build takes the place of the third; where there is none, the CUDA build stays without the
# file that registers its operators, which do not load: processors of images use only its transforms, which are Python.
$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 …" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): a few minutes the first time"
	@$(BIN)/pip install -q '$(TORCH)' 2>/dev/null || $(BIN)/pip install -q --index-url $(TORCH_INDEX) '$(TORCH)'
	@$(BIN)/pip install -q -e '.[cpu,dev]'
	@$(BIN)/pip install -q --no-deps $(NIXL) 2>/dev/null || echo "NIXL is not to be had: KV by NIXL is not tested" >&2
	@$(BIN)/pip uninstall -q -y torchaudio torchcodec 2>/dev/null || true
	@$(BIN)/pip install -q --no-deps '$(TORCHVISION)' 2>/dev/null \
	|| $(BIN)/pip install -q --no-deps --retries 1 --timeout 20 --index-url $(TORCH_INDEX) '$(TORCHVISION)' 2>/dev/null \
	|| : > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchvision/_meta_registrations.py"
	@touch $@

up: setup ## Start the suite and keep it running; ARGS='--model … --port …'.
	@exec $(BIN)/polyphase up $(ARGS)

demo: setup ## Start a suite, check every promise on it, report; ARGS='--json --keep'.
	@exec $(BIN)/polyphase demo $(ARGS)

# Those marked `alone` hold bounds of a second with real engines, which two cores can do for one of them at a time.
# mypy takes what the fast tests leave of the cores: they wait for half of their time.
test: setup ruff ## All tests.
	nice -n 19 $(BIN)/mypy & types=$$!; trap "kill $$types" INT TERM; \
	$(BIN)/python -m pytest -m 'not slow' $(PYTEST_JOBS) $(PYTEST_ARGS); tests=$$?; \
	wait $$types && exit $$tests
	$(BIN)/python -m pytest -m 'slow and not alone' $(PYTEST_JOBS) $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m alone $(PYTEST_ARGS)

test-fast: setup ## Tests without real engines.
	$(BIN)/python -m pytest -m 'not slow' $(PYTEST_JOBS) $(PYTEST_ARGS)

test-random: setup ## Property tests alone, each with 2,000 examples drawn anew: a search for rare ones; not part of `make test`.
	HYPOTHESIS_PROFILE=random $(BIN)/python -m pytest -m 'hypothesis and not slow' $(PYTEST_ARGS)

# Needs one CUDA device, or two for all of it, and vLLM's CUDA build (pip install -e '.[gpu,dev]'), in an environment of
# its own. What the devices are too few for is skipped with the reason.
gpu-check: ## The checks that need one GPU, or two; docs/gpu.md. GPU_PYTHON=python3
	@$(GPU_PYTHON) -c 'import torch; print("devices that torch sees:", [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())])'
	$(GPU_PYTHON) -m pytest tests/gpu -s $(PYTEST_ARGS)

# pip fetches vLLM's source package (20 MB) once, into .polyphase/vllm-check.
vllm-check: setup ## vLLM's own entrypoint tests, those that pass on plain vLLM, against a suite of the demo model; ARGS='--url … --model …'.
	$(BIN)/python -m benchmarks.vllm_check $(ARGS)

ray-check: setup ## A suite on three Ray nodes of this machine: lose an instance, lose a node, add two.
	$(BIN)/python -m benchmarks.deploy.ray_check

compose-check: setup ## Build the images and try compose.yaml with Docker, some ten minutes; ARGS=--keep. docs/compose.md.
	$(BIN)/python -m benchmarks.deploy.compose_check $(ARGS)

pods-check: setup ## Rendered Kubernetes pods as containers, after compose-check; ARGS='--cluster …'. docs/kubernetes.md.
	$(BIN)/python -m benchmarks.deploy.pods_check $(ARGS)

lint: setup ruff ## ruff (rules and format) and mypy.
	$(BIN)/mypy

ruff: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

clean: ## Remove the environment, caches and the data of local suites.
	rm -rf $(VENV) .polyphase .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
