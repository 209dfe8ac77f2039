# make demo   the main job end to end, on real images, in a few minutes
# make stories   the papers from images to the last table, with a few images
# make test   everything that must pass: lint, types, tests
# make docs   the site, in build/site
# They make .venv and install the package by themselves; the second time they are quick.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
OLDEST := .venv.oldest

.PHONY: demo stories test test-oldest lint types unit docs dist bench clean

demo: $(STAMP)
	$(BIN)/everytoken demo

# the commands of docs/stories, with a few images and one epoch
stories: $(STAMP)
	$(BIN)/python docs/stories/run.py

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -rs

# The same tests with the lower bounds of pyproject.toml, in an environment of their own; newer Pythons have no such old wheels.
test-oldest: $(OLDEST)/.installed
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n 2 -rs

# warnings are errors
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html -d build/doctrees docs build/site
	@echo "build/site/index.html"

# wheel and sdist, in dist
dist: $(STAMP)
	$(BIN)/python -m pip install -q build
	$(BIN)/python -m build -q

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

$(VENV)/.docs: $(STAMP)
	{ $(BIN)/python -m uv --version >/dev/null 2>&1 && $(BIN)/python -m uv pip install -q --python $(BIN)/python -e ".[docs]"; } || \
	  $(BIN)/python -m pip install -q -e ".[docs]"
	touch $@

$(OLDEST)/.installed: pyproject.toml
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	  { rm -rf $(OLDEST); echo "The oldest versions need Python 3.11; say where it is with: make PYTHON=python3.11 test-oldest"; exit 1; }
	$(OLDEST)/bin/python -m pip install -q uv
	$(OLDEST)/bin/python -m uv pip install -q --python $(OLDEST)/bin/python --resolution lowest-direct -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) build dist docs/reference .mypy_cache .ruff_cache .pytest_cache
