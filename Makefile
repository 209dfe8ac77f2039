# make demo   the main job end to end, on real images, in a few minutes
# make test   everything that must pass: lint, types, tests
# Both make .venv and install the package by themselves; the second time they are quick.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test lint types unit bench clean

demo: $(STAMP)
	$(BIN)/everytoken demo

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -rs

# ratios on this machine, kept in docs/benchmarks.md; `make bench PHOTOS=folder` also times the loader on your photos
bench: $(STAMP)
	$(BIN)/python benchmarks/all.py $(if $(PHOTOS),--photos "$(PHOTOS)")

# uv installs in a quarter of pip's time; where it cannot be had, pip does the same.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "Could not make $(VENV): Python 3.11 or newer with the venv module is needed (Debian: apt install python3-venv)."; exit 1; }
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; say which with: make PYTHON=python3.12 ..."; exit 1; }
	{ $(BIN)/python -m pip install -q uv && $(BIN)/python -m uv pip install -q --python $(BIN)/python -e ".[dev]"; } || \
	  $(BIN)/python -m pip install -q -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
