# Two commands for a fresh machine: make demo, make test. PYTHON=python3.12 picks another Python.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
READY := .venv/.ready

.PHONY: demo test bench format clean release-check

demo: .venv/.demo
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/pytest

bench: $(READY)
	$(BIN)/nrgpt bench

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Wheel and sdist, each installed in an environment of its own: the core, and every extra.
release-check: $(READY)
	$(BIN)/python dev/check_release.py

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache

# The demo needs little; the tests need every extra.
.venv/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) --editable ".[plot]"
	touch $@

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) --editable ".[dev]"
	touch $@ .venv/.demo
