# `make demo` and `make test` do everything, set-up included.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JOBS ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu)

.PHONY: help setup demo tour format lint types test test-full mutants bench docs clean

help:            ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

setup: $(READY)  ## virtual environment with everything needed to develop

# torch first and exactly: a looser request may bring several gigabytes of GPU libraries
$(READY): pyproject.toml constraints.txt hatch_build.py $(wildcard src/subquad/kernels/cpu/src/*.?pp) src/subquad/kernels/cpu/build.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(READY)   ## FAVOR, exact attention and controls on proteins and a task of memory; under five minutes
	$(BIN)/subquad demo --out demo

tour: $(READY)   ## accuracy, time and memory of the mechanisms in the terminal; half a minute
	$(BIN)/python benchmarks/tour.py

format: $(READY) ## rewrite the code in the project's style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix --quiet .

lint: $(READY)   ## style and common mistakes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)  ## static types
	$(BIN)/pyright --pythonpath $(BIN)/python

test: lint types ## lint, types and the test suite, a few minutes
	$(BIN)/python -m pytest -m "not full" -n $(JOBS)

test-full: test mutants ## everything: gradcheck, torch.compile, fuzzing, thirty kills, two processes, mutants
	$(BIN)/python -m pytest -m full -n $(JOBS)

mutants: $(READY) ## hand-made bugs, each of which must turn a test red
	$(BIN)/python tests/mutants/run.py

bench: $(READY)  ## speed and memory against exact attention; features on pretrained models, which are downloaded once
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/real_heads.py
	$(BIN)/subquad bench fidelity --output benchmarks/results

docs: $(READY)   ## check that every example in the documentation runs
	$(BIN)/python -m pytest -q tests/test_docs.py

clean:           ## remove what the other commands made
	rm -rf $(VENV) demo build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
