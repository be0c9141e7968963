# Two commands do it all on a fresh machine with python3, make and git: `make demo`, `make test`.
#
#   make setup VARIANT=gpu     the CUDA packages instead of the CPU ones
#   make demo PYTHON=python3.12
#   make test TESTS="tests/ranking -k ties"

PYTHON ?= python3
VARIANT ?= cpu
VENV ?= .venv
TESTS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
READY := $(VENV)/.ready-$(VARIANT)

.PHONY: help setup demo test slow gpu test-all mutations lint types hooks docs clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## the environment, in .venv

# Order matters.  torch goes first, so that nothing else picks another build of it.  torchrec goes
# without its dependencies on the CPU, because they name the CUDA build of fbgemm.
$(VENV)/.ready-cpu: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet torch==2.13.0
	$(PIP) install --quiet --editable '.[cpu,test]'
	$(PIP) install --quiet --no-deps torchrec==1.8.0
	touch $@

$(VENV)/.ready-gpu: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --editable '.[gpu,test]'
	touch $@

demo: $(READY)  ## trains on the graph of countries inside the package, then asks it something
	rm -rf runs/demo
	$(BIN)/kge-torchrec train demo --run.dir runs/demo
	@echo
	@echo "Which countries border Austria?"
	$(BIN)/kge-torchrec predict runs/demo --head Austria --relation borders --top 10

# Files are shared out among as many processes as there are cores, but no more than memory is likely to
# hold: each may have four ranks beside it.
test: $(READY)  ## the tests; TESTS="tests/ranking -k ties" for some of them
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(TESTS)

slow: $(READY)  ## tests that take minutes each
	$(BIN)/python -m pytest -m slow $(TESTS)

gpu: $(READY)  ## tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(TESTS)

test-all: test slow  ## both

mutations: $(READY)  ## puts deliberate faults in, one by one: a test must notice each
	$(BIN)/python scripts/check_mutations.py

lint: $(READY) types  ## what CI checks besides the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/check_language.py

types: $(READY)  ## mypy, which lint runs too
	$(BIN)/python -m mypy

hooks: $(VENV)/.ready-dev  ## checks of lint before every commit of this checkout
	$(BIN)/pre-commit install

docs: $(VENV)/.ready-dev  ## the docs as a site, in site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --site-dir site

$(VENV)/.ready-dev: $(READY)
	$(PIP) install --quiet --editable '.[dev]'
	touch $@

clean:  ## removes the environment, runs, caches and the site
	rm -rf $(VENV) runs site .pytest_cache .ruff_cache .hypothesis
