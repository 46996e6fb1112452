# `make run` trains the default job on one worker per core, `make test` runs every check. Each does its own set-up in .venv.

PYTHON ?= python3
# The build of torch that the virtual environment gets. An exact version resolves to a CPU build where
# one is offered; on a CUDA machine choose your own:  make run TORCH="torch==2.13.0 --index-url ..."
TORCH  ?= torch==2.13.0
ARGS   ?=
# How tests run: two at a time, which two cores and 8 GiB of memory bear.  make test AT_ONCE= runs one after another
AT_ONCE ?= -n 2 --dist worksteal

BIN := .venv/bin
# A checkout may stand beside a folder of real data sets; the package itself knows no such path.
ifneq ($(wildcard ../shared/data/.),)
export SHOAL_DATA ?= $(abspath ../shared/data)
endif

.PHONY: run test check format docs clean

run: .venv/.run
	$(BIN)/shoal train --workers auto $(ARGS)

# Tests start some hundred programs: each would compile all modules anew where the environment forbids to keep them.
test: export PYTHONDONTWRITEBYTECODE :=
test: check
	$(BIN)/python -m pytest $(AT_ONCE) $(ARGS)

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documents as pages, and a reference from docstrings; a broken link is an error. tests/test_docs.py does it too.
docs: .venv/.dev
	$(BIN)/mkdocs build
	@echo "open build/site/index.html"

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# torch first and exact: an open range in a dependency would otherwise choose another build.
.venv/.torch: Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shoal needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	touch $@

.venv/.run: .venv/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

.venv/.dev: .venv/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@ .venv/.run
