# Two commands for a fresh machine: make demo, make test. PYTHON=python3.12 picks another Python.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
READY := .venv/.ready

.PHONY: demo test test-pages bench docs format clean

demo: .venv/.demo
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/pytest

# The explorer at every width, in light and dark; out/pages has pictures to look at.
test-pages: $(READY)
	mkdir -p out/pages
	NRGPT_LONG=1 NRGPT_SCREENSHOTS=$(CURDIR)/out/pages $(BIN)/pytest tests/explore

docs: .venv/.docs
	$(BIN)/python dev/docs/build.py

bench: $(READY)
	$(BIN)/nrgpt bench

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache

# The demo needs little; the tests need every extra.
.venv/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) --editable ".[plot]"
	touch $@

.venv/.docs: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) --editable ".[docs,eval]"
	touch $@

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) --editable ".[dev]"
	touch $@ .venv/.demo
