# Everything happens in .venv, which is made on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test lint check docs reference site soak simulate bench clean

help: ## show this list
	@grep -hE '^[a-z.]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z.]+):[^#]*## /  make \1\t/' | expand -t 20

demo: $(STAMP) ## train a small language model while its workers are killed, and prove that nothing was lost
	$(BIN)/elastic-harness demo

lint: $(STAMP) ## lint, types and import rules
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

check: lint ## lint, types, import rules and the fast unit tests; under a minute
	$(BIN)/pytest -q -n 2 --dist loadgroup -m "not slow and not soak" tests/unit

test: $(STAMP) ## every test, with real processes and real signals
	$(BIN)/python -m compileall -q src
	$(BIN)/pytest -n 4 --dist loadgroup

docs: reference ## all that is made from the code: the page about all codes, and what `reference` makes
	$(BIN)/python -m elastic_harness.incidents > docs/TROUBLESHOOTING.new
	mv docs/TROUBLESHOOTING.new docs/TROUBLESHOOTING.md
	$(BIN)/python -m elastic_harness.chaos > docs/chaos.new
	mv docs/chaos.new docs/chaos.md

soak: $(STAMP) ## long random storms of failures; SOAK_MINUTES=10 by default
	SOAK_MINUTES=$${SOAK_MINUTES:-10} $(BIN)/pytest -m soak

simulate: $(STAMP) ## the protocol of many nodes under random faults; SIMULATE_SEEDS=20000 by default
	$(BIN)/elastic-harness simulate --first $${SIMULATE_FIRST:-0} --seeds $${SIMULATE_SEEDS:-20000} --workers 8 --nodes 4

bench: $(STAMP) ## the benchmarks, rivals beside us; JSON below benchmarks/
	$(BIN)/python -m benchmarks

reference: $(STAMP) ## settings, API and metrics as files and pages, and monitoring/, made from the code
	$(BIN)/python scripts/make_reference.py

site: $(STAMP) ## the documentation as a site that needs no network, in build/site; a dead link fails
	$(BIN)/python scripts/make_site.py

clean: ## remove what was built, and no runs
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,report]'
	touch $@
