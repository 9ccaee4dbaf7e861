# Every verb sets itself up: a fresh clone, Python 3.11 or 3.12 and make are enough.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV := .venv
RUN := $(VENV)/bin
STAMP := $(VENV)/.ready
ARGS ?=
WORKERS ?= 2

.PHONY: help setup check test eval train board bench clean

help:  ## what each verb does
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP)  ## a virtual environment in .venv with everything

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v in ((3, 11), (3, 12)) else f"Turnwise needs Python 3.11 or 3.12, not {v[0]}.{v[1]}; name one with: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $(STAMP)

check: $(STAMP)  ## ruff, mypy, oxlint for the board's JavaScript, and the config check of the default run
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/oxlint --deny-warnings turnwise/web/static/js
	$(RUN)/turnwise check > /dev/null

test: $(STAMP)  ## the test suite, in two processes; WORKERS=0 runs it in one, ARGS="-k sandbox" a part of it
	OMP_NUM_THREADS=1 $(RUN)/pytest -n $(WORKERS) --dist loadfile $(ARGS)

eval: $(STAMP)  ## evaluate the embedded model on the embedded task; ARGS="sampling.temperature=0" changes it
	$(RUN)/turnwise eval $(ARGS)

train: $(STAMP)  ## train the embedded model on the embedded task; ARGS="training.steps=5" changes it
	$(RUN)/turnwise train $(ARGS)

board: $(STAMP)  ## every run under runs/ in the browser; ARGS="--port 8080" changes it
	@mkdir -p runs
	$(RUN)/turnwise board $(ARGS)

bench: $(STAMP)  ## every benchmark; each prints a ratio against a named peer
	@for file in benchmarks/*.py; do echo "== $$file"; $(RUN)/python $$file || exit 1; done

clean:  ## remove the environment and caches; runs/ and data/ stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
