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

.PHONY: setup demo test slow lint clean

setup: $(READY)

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

# Trains on the graph of countries inside the package, then asks it something.
demo: $(READY)
	rm -rf runs/demo
	$(BIN)/kge-torchrec train demo --run.dir runs/demo
	@echo
	@echo "Which countries border Austria?"
	$(BIN)/kge-torchrec predict runs/demo --head Austria --relation borders --top 10

test: $(READY)
	$(BIN)/python -m pytest $(TESTS)

# The checks that take minutes each.
slow: $(READY)
	$(BIN)/python -m pytest -m slow $(TESTS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) runs .pytest_cache .ruff_cache .hypothesis
