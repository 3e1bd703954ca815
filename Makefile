# The commands of this repository. `make quickstart` on a fresh machine needs Python 3.11 or newer and nothing else.

PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(if $(shell $(name) -c \
	'import sys; print("yes" * (sys.version_info >= (3, 11)))' 2>/dev/null),$(name))))
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
DRUMLINE := $(BIN)/drumline
BASELINE := tests/baselines/llama3-debug

# Spinning OpenMP threads slow down ranks that share a core; one thread a rank is what the forked tests assume.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive

.PHONY: help quickstart install test test-slow test-all gate check format docs bench clean

help:  ## Show what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

quickstart: install  ## Train a small Llama on real text on two ranks, then write its report
	$(DRUMLINE) train llama3-debug --nproc 2 layout=dp2 run.name=quickstart
	$(DRUMLINE) report runs/quickstart

install: $(READY)  ## Make .venv with drumline and the tools of development, at the pinned versions

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "drumline needs Python 3.11 or newer and found none; name one: make PYTHON=/path/to/python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "drumline needs Python 3.11 or newer; $(PYTHON) is older" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments: install its venv package (Debian, Ubuntu: apt install python3-venv)" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

test: install  ## Run the tests, without the long matrix
	$(TEST_ENV) $(BIN)/python -m tests.side_by_side -m "not slow"

test-slow: install  ## Run the long matrix
	$(TEST_ENV) $(BIN)/python -m tests.side_by_side -m slow

test-all: install  ## Run every test
	$(TEST_ENV) $(BIN)/python -m tests.side_by_side

gate: install  ## Hold what this code computes against the stored baseline
	rm -rf build/gate
	$(TEST_ENV) $(DRUMLINE) numerics capture $(BASELINE)/recipe.json --steps 1,2 --out build/gate/fp32
	$(TEST_ENV) $(DRUMLINE) numerics capture $(BASELINE)/recipe.json layout=fsdp2.tp2 precision.compute=bf16 --steps 1,2 --out build/gate/bf16
	$(DRUMLINE) numerics gate build/gate/fp32 build/gate/bf16 --against $(BASELINE) --junit build/gate/gate.xml

check: install  ## Lint, format, types, layers, docstrings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/pydoclint --quiet src/drumline

format: install  ## Put the code in its format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install  ## Run the documentation's commands and write their output into it
	$(TEST_ENV) $(BIN)/python -m tests.docs.regenerate

bench: install  ## Run every benchmark in its quick form
	status=0; for script in benchmarks/*.py; do $(BIN)/python $$script --quick || status=1; done; exit $$status

clean:  ## Remove the environment and the runs
	rm -rf $(VENV) runs
