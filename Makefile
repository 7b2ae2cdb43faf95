# `make demo` and `make test` are all that a first visit needs. Both make .venv and install what they use.
VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet -c constraints.txt
# Tests use tiny tensors and start several ranks on few cores: one thread each is fastest, and no pool of compilers.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1
# Two workers, a file to each: every worker keeps its own ranks, which take memory.
PYTEST_ARGS ?= -q -n 2 --dist loadfile

.PHONY: demo test lint bench notebooks docs docs-serve clean

demo: $(VENV)/.demo
	$(BIN)/ftrain train debug --out runs/debug

test: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.step_cpu
	$(BIN)/python -m benchmarks.checkpoint
	$(BIN)/python -m benchmarks.data

# Runs docs/notebooks in place: what a cell shows in the repository is what it gave here.
notebooks: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python tests/notebooks.py

# The guides and the reference as a site: open site/index.html.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open site/index.html"

docs-serve: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean:
	rm -rf $(VENV) build dist *.egg-info runs site

# A stamp file per set of packages: a second `make` installs nothing. torch is named with the rest in one pip call
# and pinned by constraints.txt, so that it is resolved once and to the tested version.
$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "ftrain needs Python 3.11 or newer: none found. Use: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "ftrain needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version`. Use: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) torch -e ".[plot]"
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) torch -e ".[dev]"
	@touch $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) torch -e ".[docs]"
	@touch $@
