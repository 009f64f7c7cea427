# What a fresh machine needs: git, python3 (3.11 or newer), make. `make help` lists what there is.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
JOBS ?= auto

.PHONY: help setup test lint types unit torch-suite demo bench wheel constraints clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(STAMP)  ## make .venv with everything pinned in constraints.txt (only if something changed)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

test: lint types unit  ## ruff, mypy --strict, and all tests

lint: $(STAMP)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy --strict
	$(BIN)/mypy

unit: $(STAMP)  ## the tests, on all cores (JOBS=n for n)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

torch-suite: $(STAMP)  ## all of torch's own distributed tests that pass over gloo, over holdfast
	$(BIN)/python tests/torch_suite.py compare

demo: $(STAMP)  ## the reference workload: train, break it three times, see it recover, write report/report.html
	$(BIN)/holdfast demo

bench: $(STAMP)  ## all_reduce over shm beside gloo and Open MPI, interleaved
	$(BIN)/holdfast bench all_reduce --backends shm,gloo -n 2 --sizes 8:64M --peers

wheel: $(STAMP)  ## build the wheel into dist/
	$(BIN)/python -m build --wheel --no-isolation

constraints: $(STAMP)  ## write constraints.txt anew from what is installed in .venv
	{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip list --format=freeze --disable-pip-version-check \
	  | grep -v -i -E '^(holdfast|pip)==' | sed 's/+cpu$$//'; } > constraints.new
	mv constraints.new constraints.txt

clean:  ## remove what was built and cached, and .venv
	rm -rf $(VENV) build dist report holdfast.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
