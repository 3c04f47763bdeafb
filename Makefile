# Two commands for a fresh machine: make demo, make test. PYTHON=python3.12 picks another Python.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
INSTALL := $(PIP) --constraint constraints.txt
READY := .venv/.ready

.PHONY: demo test faults kernels test-pages bench docs format lock audit clean release-check

demo: .venv/.demo
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/pytest

# Thousands of faults (half an hour on two cores); the tests have a short form of them.
faults: $(READY)
	NRGPT_FAULTS=long $(BIN)/pytest tests/faults

# The Triton kernels on a CPU, by Triton's interpreter: in a folder of its own, since torch's builds
# for CPUs do without triton's 290 MB.
kernels: $(READY)
	test -d .venv/triton || $(PIP) --no-deps --target .venv/triton "triton>=3.6"
	PYTHONPATH=.venv/triton $(BIN)/pytest -n 0 tests/kernels/test_interpreted.py

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

# Wheel and sdist, each installed in an environment of its own: the core, and every extra.
release-check: $(READY)
	$(BIN)/python dev/check_release.py

lock: $(READY)
	bash dev/lock.sh

# Known vulnerabilities of what is installed, asked of PyPI; pip-audit stays out of .venv.
audit: $(READY)
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet pip-audit
	.venv-audit/bin/pip-audit --strict --disable-pip --require-hashes --requirement requirements.lock

clean:
	rm -rf .venv .venv-audit .pytest_cache .ruff_cache .mypy_cache

# The demo needs little; the tests need every extra.
.venv/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) --editable ".[plot]"
	touch $@

.venv/.docs: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) --editable ".[docs,eval]"
	touch $@

# Files with other hashes than those in requirements.lock are refused. torch comes last, in the
# build that suits the machine: it is the one package without a hash (SECURITY.md).
$(READY): pyproject.toml constraints.txt requirements.lock
	$(PYTHON) -m venv .venv
	$(PIP) --no-deps --require-hashes --requirement requirements.lock
	$(INSTALL) torch
	$(PIP) --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip check
	touch $@ .venv/.demo
