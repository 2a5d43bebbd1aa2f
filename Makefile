# `make demo` and `make test` need only Python 3.11 or newer and make: each makes .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ATTACKS ?= 50
OUT ?= results/speed-h200

.PHONY: demo test test-full lint format types pytest results speed docs attacks slow slurm-test clean help

help:  ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(STAMP)  ## train a tiny GPT with seven methods and report what that shows: at most 4 minutes on 2 cores
	$(BIN)/oelm demo

test: lint types pytest  ## the quick gate: lint, types, and tests that sample every part

test-full: $(STAMP)  ## every test that needs no GPU, no network and no minutes of its own
	$(BIN)/pytest -q -n 2 --dist worksteal -m 'not slow and not gpu and not net and not slurm'

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

pytest: $(STAMP)
	$(BIN)/pytest -q -n 2 --dist worksteal

results: $(STAMP)  ## write docs/results.md and its details, why.md, performance.md, and the READMEs' table and picture
	$(BIN)/python -m oelm.report.evidence results/questions.yaml docs/results.md README.md README.zh-CN.md
	$(BIN)/python -m oelm.report.why results/why.yaml docs/why.md
	$(BIN)/python -m oelm.report.performance docs/performance.md results/speed-h200 results/bench-h200
	$(BIN)/python docs/attention/overview.py

speed: $(STAMP)  ## measure what docs/performance.md shows, on one GPU (NANOGPT=CLONE OUT=FOLDER PARTS="grow forms")
	results/speed.sh $(OUT) $(PARTS)

docs: $(VENV)/.docs  ## build the site of the guides and the API reference in build/site, and check its links
	$(BIN)/python docs/site/build.py

attacks: $(STAMP)  ## every attack on files, proofs and processes, ATTACKS (50) times as often as in make test-full
	OELM_ATTACKS=$(ATTACKS) $(BIN)/pytest -q -rP -p no:logging -n 2 --dist worksteal -m full --timeout 3600 tests/attacks

slow: $(STAMP)  ## the tests that take minutes
	$(BIN)/pytest -q -n 2 --dist worksteal -m slow

slurm-test: $(STAMP)  ## a matrix on a real Slurm of two pretend nodes, which must be installed: about 10 minutes
	@tests/slurm/cluster.sh check
	$(BIN)/pytest -q -n 0 -m slurm tests/slurm

format: $(STAMP)  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "oelm needs Python 3.11 or newer; $(PYTHON) is older. Use: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	@touch $@

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) build .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
