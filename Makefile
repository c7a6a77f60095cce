# On a fresh machine with Python 3.11+ and make:  `make demo`  and  `make test`  do all the set-up.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
export MPLBACKEND = Agg

.PHONY: demo test lint bench docs clean

demo: $(VENV)/.installed
	$(BIN)/python -m ccssl demo

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

bench: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks

docs: $(VENV)/.installed-docs
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html
	$(BIN)/sphinx-build -W --keep-going -b doctest docs docs/_build/doctest

clean:
	rm -rf $(VENV) build dist docs/_build .pytest_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "ccssl needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

# TorchCP asks for torchsort, which needs a compiler of the same CUDA as torch; what is measured does without.
$(VENV)/.installed-bench: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	$(BIN)/python -m pip install --quiet --no-deps 'torchcp>=1.2'
	@touch $@ $(VENV)/.installed

# the stamp of a named extra: .installed-dev, .installed-bench, .installed-docs
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$*]'
	@touch $@ $(VENV)/.installed
