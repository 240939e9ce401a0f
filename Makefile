# Every target makes its environment ready first; `make setup` alone does only that.

PYTHON ?= python3
BIN := .venv/bin
SEEDS ?= 10000
# Where it is switched off, every process of the tests compiles them anew, with pytest's rewritten assertions.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-fast sim check setup
.DEFAULT_GOAL := demo

demo: setup          ## start a cell, load the help centre, ask three questions, stop
	@$(BIN)/python -m gateway.demo $(ARGS)

test: setup          ## the whole suite, real cells and real vLLM included
	@$(BIN)/python -m pytest $(ARGS)

test-fast: setup     ## without real cells, vLLM and what else is slow: about a minute
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m "not cell and not vllm and not slow" $(ARGS)

sim: setup           ## simulated worlds full of faults, SEEDS of them
	@GRID_SIM_SEEDS=$(SEEDS) $(BIN)/python -m pytest -n 2 --dist worksteal tests/sim $(ARGS)

check: setup         ## what CI runs: format, lint, types, import contract, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest $(ARGS)

setup:               ## .venv with everything in it; at once when nothing changed
	@$(PYTHON) scripts/setup.py
