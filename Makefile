# Everything runs in .venv, which `make setup` makes; the other targets make it first where it is missing or old.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

# The first that is Python 3.11 or newer; or name one: make PYTHON=/path/to/python3.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do \
	$$name -c '$(IS_NEW_ENOUGH)' 2>/dev/null && echo $$name && break; done)

.PHONY: setup demo test check up bench faults hostile image compose-test clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@"$(PYTHON)" -c '$(IS_NEW_ENOUGH)' 2>/dev/null || { \
		echo "error: no Python 3.11 or newer was found: install one, or name it with make PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(BIN)/pip || "$(PYTHON)" -m venv $(VENV)
	@echo "installing into $(VENV) (the first time downloads 500 MB, most of it for a local ZooKeeper) ..." >&2
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[local,dev]'
	@touch $@

demo: setup
	$(BIN)/minibroker demo

test: setup
	$(BIN)/pytest

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

up: setup
	$(BIN)/minibroker up

# On a cluster of its own, whose data is removed at the end.
BENCH_DATA := .minibroker/bench
bench: setup
	$(BIN)/minibroker up --detach --data $(BENCH_DATA) --base-port 29092
	$(BIN)/minibroker bench produce --data $(BENCH_DATA) && \
	$(BIN)/minibroker bench consume --by batches --data $(BENCH_DATA) && \
	$(BIN)/minibroker bench consume --by records --data $(BENCH_DATA); \
	status=$$?; $(BIN)/minibroker down --delete-data --yes --data $(BENCH_DATA); exit $$status

# Kills members of a cluster of its own under load, ROUNDS times each, and judges what was acknowledged.
ROUNDS := 3
faults: setup
	$(BIN)/python -m tests.faults.kill_rounds --rounds $(ROUNDS)

# Bad input in bulk, and hundreds of slow connections, each at a broker of its own.
FRAMES := 200000
hostile: setup
	$(BIN)/python -m tests.faults.hostile_frames --frames $(FRAMES)
	$(BIN)/python -m tests.faults.slow_connections

# Builds the images of deploy/docker-compose.yml, and prints their sizes. Where no base image can be pulled, it makes one
# from Debian's packages (as root, with debootstrap).
image:
	deploy/make-images.sh

# Containers on a docker engine, killed, paused and disconnected under load.
compose-test: setup image
	$(BIN)/pytest -s tests/compose

clean:
	rm -rf $(VENV) $(BENCH_DATA) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
