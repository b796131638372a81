# Everything runs in .venv; the two commands of the README are `make demo` and `make test`.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: setup system demo test lint up down campaign bench clean

# Bare Debian: what needs apt, where we may; elsewhere it says what is missing.
system:
	@sh deployments/system_packages.sh

$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 or newer is needed: set PYTHON=python3.x"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[dev]'
	@touch $(READY)

setup: system $(READY)

demo: setup
	$(BIN)/python -m deployments.demo

up: setup
	$(BIN)/python -m deployments.up $(if $(PORT),--port $(PORT))

down:
	$(BIN)/python -m deployments.down $(if $(MACHINES),--machines)

test: setup
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

campaign: setup
	$(BIN)/python -m tests.campaign

bench: setup
	$(BIN)/python -m benchmarks.peers

clean: down
	rm -rf $(VENV) out
