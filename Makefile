# On a fresh machine with python3, make and git, run `make demo` or `make test`.
#
#   make demo TORCH_INDEX=URL  torch from the index of CPU builds that PyTorch's site names
#   make demo PYTHON=python3.12
#   make setup VARIANT=gpu     the CUDA packages instead of the CPU ones
#   make test TESTS="tests/ranking -k ties"

PYTHON ?= python3
VARIANT ?= cpu
TORCH_INDEX ?=
VENV ?= .venv
TESTS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
READY := $(VENV)/.ready-$(VARIANT)
TESTED := $(VENV)/.ready-test

.PHONY: help setup demo smoke test slow gpu test-all mutations lint types hooks docs clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## install the package into .venv

# The order matters. torch goes first, so that no other package chooses its build. On the CPU,
# torchrec goes without its dependencies, because they name the CUDA build of fbgemm.
$(VENV)/.ready-cpu: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet torch==2.13.0 $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) install --quiet --editable '.[cpu]'
	$(PIP) install --quiet --no-deps torchrec==1.8.0
	touch $@

$(VENV)/.ready-gpu: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --editable '.[gpu]'
	touch $@

$(TESTED): $(READY)
	$(PIP) install --quiet --editable '.[test]'
	touch $@

demo: $(READY)  ## train on the embedded graph of countries, then predict
	rm -rf runs/demo
	$(BIN)/python scripts/train.py demo --run.dir runs/demo
	@echo
	@echo "Which countries border Austria?"
	$(BIN)/kge-torchrec predict runs/demo --head Austria --relation borders --top 10

smoke: $(READY)  ## in under a minute: train on two ranks, resume, evaluate, predict, export
	rm -rf runs/smoke runs/smoke-export
	$(BIN)/torchrun --nproc-per-node 2 -m kge_torchrec train demo --run.dir runs/smoke --train.epochs 2
	$(BIN)/kge-torchrec train --resume runs/smoke --train.epochs 3
	$(BIN)/kge-torchrec evaluate runs/smoke --by relation
	$(BIN)/kge-torchrec export runs/smoke --output runs/smoke-export
	$(BIN)/kge-torchrec predict runs/smoke-export --head Austria --relation borders

# One process per core, at most four: each may start four ranks, which need memory.
test: $(TESTED)  ## run the tests; TESTS="tests/ranking -k ties" selects some
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(TESTS)

slow: $(TESTED)  ## run tests that start processes, compile or build
	$(BIN)/python -m pytest -m slow $(TESTS)

gpu: $(TESTED)  ## run tests that need a CUDA device, in at most 9 minutes
	$(BIN)/python -m pytest -m gpu $(TESTS)

test-all: test slow  ## run test and slow

mutations: $(TESTED)  ## put each deliberate fault into a copy, and see that a test notices it
	$(BIN)/python scripts/faults.py --jobs 2

lint: $(TESTED) types  ## run ruff, mypy, import-linter and codespell, as CI does
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell *.md docs kge_torchrec configs scripts

types: $(TESTED)  ## run mypy
	$(BIN)/python -m mypy

hooks: $(VENV)/.ready-dev  ## run lint before every commit
	$(BIN)/pre-commit install

docs: $(VENV)/.ready-dev  ## build the docs in site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --site-dir site

$(VENV)/.ready-dev: $(TESTED)
	$(PIP) install --quiet --editable '.[dev]'
	touch $@

clean:  ## remove the environment, runs, caches and the site
	rm -rf $(VENV) runs site .pytest_cache .ruff_cache .hypothesis
