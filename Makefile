# Everything starts from nothing: the first target that needs it makes .venv and installs into it.
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint bench docs licences clean

demo: $(READY)
	$(BIN)/metabayfl demo

test: $(READY)
	$(BIN)/pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

licences: $(READY)
	$(BIN)/pip install -q -c constraints.txt $(PIP_ARGS) -e '.[dev,docs,flower,track]'
	$(BIN)/python tools/licences.py

bench: $(READY)
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/round.py
	$(BIN)/python benchmarks/selection.py
	$(BIN)/python benchmarks/batches.py
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/methods.py

docs: $(READY)
	$(BIN)/pip install -q -c constraints.txt $(PIP_ARGS) -e '.[docs]'
	$(BIN)/mkdocs build --strict

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt $(PIP_ARGS) -e '.[dev,flower]'
	touch $@

clean:
	rm -rf $(VENV) site build
