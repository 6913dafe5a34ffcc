# The two commands of the README are `make quickstart` and `make test`; both set up .venv first.

PYTHON ?= python3
# A wheel index to take torch from, where plain pip brings a CUDA build that is not wanted:
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
STAMP := $(VENV)/.installed

# Several processes share the cores; more threads each make everything slower.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup quickstart test lint bench clean

setup: $(STAMP)

# torch first and with its dependencies; the rest without, because some packages declare CUDA builds.
$(STAMP): requirements/torch.txt requirements/cpu.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; name one: make setup PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (about 2.5 GB; some minutes the first time)"
	@$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -r requirements/torch.txt
	@$(PIP) install --no-deps -r requirements/cpu.txt
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

quickstart: setup
	@$(BIN)/megatron-stare quickstart

test: setup
	@$(BIN)/python -m pytest -q

lint: setup
	@$(BIN)/ruff check .

# All of them, one JSON line each; a single one: .venv/bin/python -m benchmarks.NAME
bench: setup
	@for name in $(filter-out common chaos_kills trl_steps parity_layouts parity_ranks,$(basename $(notdir $(wildcard benchmarks/[a-z]*.py)))); do \
	  $(BIN)/python -m benchmarks.$$name || exit 1; done

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
