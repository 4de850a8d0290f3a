# `make quickstart` and `make test` do everything, from a bare machine with Python 3.11+.

VENV := .venv
BIN := $(VENV)/bin
# A name on the path may be a stub of a version manager, so that each one is tried.
PYTHON ?= $(shell for name in python3.12 python3.11 python3; do \
	if $$name -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
		>/dev/null 2>&1; then echo $$name; break; fi; done)
SITE := README.md BENCHMARKS.md CHANGELOG.md CONTRIBUTING.md SECURITY.md docs examples configs tests zjax
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.PHONY: quickstart test lint docs wheel clean

quickstart: $(VENV)/.installed
	$(BIN)/zjax train --config=configs/quickstart.py --simulated_devices=8

# Tests start a hundred programs; each would compile all modules of zjax for itself.
test: export PYTHONDONTWRITEBYTECODE :=
# Three workers for two cores: those of servers, time limits and processes often wait.
test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 3 -q -m "not slow and not gpu and not transformers"

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

# Pages link to what lies beside docs/; the site is built from links to all of it.
docs: $(VENV)/.installed-docs
	mkdir -p build/docs
	for name in $(SITE); do ln -sfn ../../$$name build/docs/$$name; done
	$(BIN)/mkdocs build --strict

wheel: | $(BIN)/python
	$(PIP) wheel --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "zjax needs Python 3.11 or newer with the venv module: install it, or run make PYTHON=<path>" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing zjax and what it needs into $(VENV) (a few minutes, once) ..."
	@$(PIP) install --editable .
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	@echo "Installing zjax and its tests into $(VENV) (a few minutes, once) ..."
	@$(PIP) install --editable '.[test]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml | $(BIN)/python
	@echo "Installing what builds the documents into $(VENV) (once) ..."
	@$(PIP) install --editable '.[docs]'
	@touch $@ $(VENV)/.installed
