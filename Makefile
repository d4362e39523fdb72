# Every target works from a fresh clone; `make help` lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH_CPU := torch==2.13.0
TORCH_FREE := megatron_branch/rollouts megatron_branch/tree megatron_branch/plan megatron_branch/schedule megatron_branch/tracking megatron_branch/config.py

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test lint format readme

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(STAMP)  ## create .venv and install everything (again only when setup.py changes)

# Without a GPU the pin comes first, so that the CPU build of torch satisfies every later requirement. Bytecode is compiled on
# all cores afterwards (a few files of the packages are templates and do not compile): without it every process pays 13 s.
$(STAMP): setup.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if nvidia-smi >/dev/null 2>&1; then echo "GPU found: pip chooses torch"; \
	else $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check "$(TORCH_CPU)"; fi
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --use-pep517 -e ".[dev,gguf,plot]"
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

quickstart: setup  ## sample rollouts with a small model, train three steps, load the result
	$(BIN)/python tools/quickstart.py

# One thread for each of the two workers: numbers do not depend on it, the time does.
test: setup  ## all tests, as continuous integration runs them
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile tests

lint: setup  ## style, formatting, types and generated tables
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(wildcard $(TORCH_FREE))
	$(BIN)/python tools/make_readme_tables.py --check

format: setup  ## apply formatting and safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

readme: setup  ## write the generated tables of the README again
	$(BIN)/python tools/make_readme_tables.py
