# Each target sets up what it needs in .venv; nothing else has to be installed but Python >= 3.11.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Files are spread over processes: most of the time of most tests is compiling, on one core.
WORKERS := -n auto --maxprocesses 4 --dist loadfile

.PHONY: quickstart test test-all lint docs clean

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "jaxrl needs Python 3.11 or newer, this is " + sys.version; sys.exit(0)'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable .
	touch $@

$(STAMP)-dev: $(STAMP)
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

$(STAMP)-docs: $(STAMP)
	$(BIN)/pip install --quiet --editable '.[docs]'
	touch $@

quickstart: $(STAMP)  ## train a small model from random weights, about two minutes on two cores (LOG.md)
	$(BIN)/python -m jaxrl.train --config=configs/quickstart.py

test: $(STAMP)-dev  ## everything that is not marked slow
	$(BIN)/python -m pytest $(WORKERS)

test-all: $(STAMP)-dev $(STAMP)-docs  ## slow tests too
	$(BIN)/python -m pytest $(WORKERS) -m ''

lint: $(STAMP)-dev  ## what pre-commit and CI check
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pre-commit run --all-files

docs: $(STAMP)-docs  ## the site in build/site, which opens from the file system; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf .venv runs build/site
