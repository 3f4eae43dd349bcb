# `make demo` and `make test` do all their own set-up: a virtual environment in .venv with the pinned packages of
# constraints.txt, and the embedded model in the user's cache. Both can be run again, and offline once installed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# One worker a logical core ("auto" would count physical ones); each computes with one thread
WORKERS ?= logical

.PHONY: help demo test lint models unit coverage wheel docs claims-table clean

help:
	@echo "make demo          tune the embedded model on the bundled sample and show what changed (about two minutes, once installed)"
	@echo "make test          lint, types, tests, examples, and the built wheel: what CI runs"
	@echo "make coverage      the tests again, counting lines"
	@echo "make docs          build the documentation into site/"
	@echo "make claims-table  write docs/claims.md from evidence/"

# The stamp is newer than what it was installed from, or the environment is brought up to date.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,docs,bench]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/acclimate models add smollm2
	$(BIN)/acclimate tune --output runs/demo --overwrite

test: lint wheel unit

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m acclimate.claims.table --write docs/claims.md --evidence evidence --check

models: $(VENV)/.installed
	$(BIN)/acclimate models add smollm2 --quiet
	$(BIN)/acclimate models add minilm --quiet

unit: models
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Counting lines makes the tests slower by a third, so it is a target of its own
coverage: models
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --cov --cov-report=term

wheel: models
	$(BIN)/python scripts/check_wheel.py

docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

claims-table: $(VENV)/.installed
	$(BIN)/python -m acclimate.claims.table --write docs/claims.md --evidence evidence

clean:
	rm -rf $(VENV) site dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
