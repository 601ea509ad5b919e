# Everything runs in .venv, which the first target makes. Stamps keep repeated calls quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
# The machine is divided over test workers, not over threads inside one.
export OMP_NUM_THREADS ?= 1
WORKERS ?= 2
BUNDLED := examples/bundled

.PHONY: help demo test test-fast lint format examples clean
.DEFAULT_GOAL := help

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.package ## verify the bundled network against both of its properties
	@for spec in digits_ball_sat digits_square_unsat; do \
	  echo "parverify run $(BUNDLED)/digits.onnx $(BUNDLED)/$$spec.vnnlib"; \
	  $(BIN)/parverify run $(BUNDLED)/digits.onnx $(BUNDLED)/$$spec.vnnlib --timeout 60 > $(VENV)/demo.txt || exit $$?; \
	  answer=$$(head -n 1 $(VENV)/demo.txt); \
	  echo "$$answer"; \
	  grep -q "$$spec.vnnlib,$$answer," $(BUNDLED)/expected.csv || { echo "expected another answer" >&2; exit 1; }; \
	done

test: $(VENV)/.development ## the whole test suite
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-fast: $(VENV)/.development ## the tests that together take less than a minute
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow"

lint: $(VENV)/.development ## ruff and mypy, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.development ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

examples: $(VENV)/.development ## train the example networks into examples/out
	$(BIN)/python examples/make_examples.py

clean: ## remove the environment and everything made
	rm -rf $(VENV) build dist *.egg-info examples/out .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.package: pyproject.toml | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(VENV)/.development: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[test,lint]'
	$(PIP) --no-deps auto-lirpa==0.3  # its own requirements, of 2022, admit no current torch
	@touch $@ $(VENV)/.package
