# Needs Python 3.11 or newer and make; everything else goes into .venv, and .venv-newest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# With the newest torch; another environment that has it will do as well.
NEWEST ?= .venv-newest
# With pip's own progress: torch takes minutes, and they should not be silent.
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORTURE_SECONDS ?= 120
FUZZ_INPUTS ?= 100000
# Of torch; PIP_INDEX_URL may name where pip finds builds without CUDA, which are smaller.
VERSIONS ?= 2.11 2.12 2.13 2.14 2.15
# How many tests run side by side; each has one thread of its own, or they would fight for the cores.
JOBS ?= 2
# With bytecode, also where the environment says otherwise: or each of them would compile all tests.
ALONE := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
SIDE_BY_SIDE = -m pytest --numprocesses $(JOBS) --dist worksteal
PYTEST = $(ALONE) $(BIN)/python $(SIDE_BY_SIDE)
ON_NEWEST = PYTHONPATH="$(CURDIR)" $(ALONE) $(NEWEST)/bin/python
QUICK := not (processes or slow or zoo or matrix)
# Planning and drawing, and their tests where they do not look at torch: no torch changes them.
WITHOUT_TORCH = taktline/plan taktline/render $(shell grep -L torch tests/plan/test_*.py tests/render/test_*.py)
# Not those that need a GPU, nor files that begin with _, which are helpers.
ON_GPU := benchmarks/cuda_graphs.py benchmarks/compiled.py benchmarks/offload.py benchmarks/memory_estimate.py
BENCHMARKS := $(filter-out benchmarks/_% $(ON_GPU),$(sort $(wildcard benchmarks/*.py)))

# mkdocs-material prints a notice about its end of life unless told not to.
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# One after the other, whatever make is told; TOGETHER is for those that are quicker side by side.
ifndef TOGETHER
.NOTPARALLEL:
endif
.PHONY: help demo test unit tests matrix lint style types format docs bench torture faults elastic zoo cpus versions newest clean

help: ## List the targets
	@echo "Usage: make TARGET [PYTHON=python3.x]"
	@echo
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | \
		while IFS='|' read -r target words; do printf '  %-8s %s\n' "$$target" "$$words"; done

demo: $(VENV)/.stamp-cli ## Install the package with its commands and train a small GPT
	@$(BIN)/taktline demo

# Types and documentation beside the tests, which wait now and then and leave a core idle.
test: style ## Everything that must pass: lint, types, imports, tests, docs
	@$(MAKE) --no-print-directory --jobs=2 TOGETHER=1 tests types docs

unit: $(VENV)/.stamp-dev ## Run the quick tests, in one process each, and the doctests
	$(PYTEST) -m "$(QUICK)"

tests: $(VENV)/.stamp-dev ## Run the tests and the doctests
	$(PYTEST) -m "not matrix"

matrix: $(VENV)/.stamp-dev ## Run all combinations of which the tests run some
	$(PYTEST) -m matrix

lint: style types ## Check style, format, types and imports

style: $(VENV)/.stamp-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

# In one thread: a second one reads torch again, and two take as long as one.
types: $(VENV)/.stamp-dev
	$(BIN)/pyright

format: $(VENV)/.stamp-dev ## Format the code and sort its imports
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

# Not --quiet: it hides warnings from --strict as well.
docs: $(VENV)/.stamp-dev ## Build the documentation into site/
	$(BIN)/mkdocs build --strict --site-dir site

bench: $(VENV)/.stamp-dev ## Run each benchmark that needs no GPU, and draw docs/benchmarks.md
	@set -e; for file in $(BENCHMARKS); do echo "== $$file"; BENCH_RECORD=1 $(BIN)/python "$$file"; done
	@$(BIN)/python benchmarks/_figures.py

torture: $(VENV)/.stamp-dev ## Run random plans, values, faults for TORTURE_SECONDS, and FUZZ_INPUTS
	@$(BIN)/python -m tests.torture --seconds $(TORTURE_SECONDS)
	@$(BIN)/python -m tests.fuzz --inputs $(FUZZ_INPUTS)

faults: $(VENV)/.stamp-dev ## Kill, stop, interrupt and cut off ranks in every phase of a step
	@$(BIN)/python -m tests.faults

elastic: $(VENV)/.stamp-dev ## Lose ranks of 100 jobs, which must train on as if nothing had happened
	@$(BIN)/python -m tests.elastic

zoo: $(VENV)/.stamp-dev ## Train every architecture of the zoo on pipelines, and write docs/models.md
	@$(BIN)/python -m tests.zoo

cpus: $(VENV)/.stamp-dev ## Run the tests that compare numbers as on other CPUs
	@$(BIN)/python -m tests.cpus

versions: $(VENV)/.stamp-dev ## Test each Python and torch that can be installed, and write docs/support.md
	@$(BIN)/python -m tests.versions --torch $(VERSIONS)

newest: $(NEWEST)/.stamp ## Run the quick tests, the drop-in, timm and torchrun with the newest torch
	@$(NEWEST)/bin/python -c 'import torch; print("== torch", torch.__version__)'
	$(ON_NEWEST) $(SIDE_BY_SIDE) $(addprefix --ignore=,tests/compat taktline/compat $(WITHOUT_TORCH)) -m "$(QUICK)"
	$(ON_NEWEST) $(SIDE_BY_SIDE) -m "zoo or not matrix" -k "compat or timm or accelerate" \
		tests/compat taktline/compat tests/zoo tests/test_examples.py

clean: ## Remove the venvs and everything that was built
	rm -rf $(VENV) .venv-newest site build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find taktline tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

define make-venv
@command -v "$(PYTHON)" >/dev/null || \
	{ echo "taktline needs Python 3.11 or newer, and there is no '$(PYTHON)' here: name one with make PYTHON=..." >&2; exit 1; }
@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "taktline needs Python 3.11 or newer, and '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1): name another with make PYTHON=..." >&2; exit 1; }
@"$(PYTHON)" -m venv $(1)
endef

$(VENV)/.stamp-venv:
	$(call make-venv,$(VENV))
	@touch $@

$(VENV)/.stamp-cli: pyproject.toml constraints.txt | $(VENV)/.stamp-venv
	@echo "Installing taktline into $(VENV) ..."
	@$(PIP) install --constraint constraints.txt --editable '.[cli]'
	@touch $@

# The development install holds all that the commands need, so it stands for both.
$(VENV)/.stamp-dev: pyproject.toml constraints.txt | $(VENV)/.stamp-venv
	@echo "Installing taktline and its development tools into $(VENV) ..."
	@$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $(VENV)/.stamp-cli $@

# At the same versions, but for torch and triton, which belongs to it.
$(NEWEST)/.stamp: pyproject.toml constraints.txt
	@echo "Installing the newest torch (several GB) and the development tools into $(NEWEST) ..."
	$(call make-venv,$(NEWEST))
	@grep --invert-match --extended-regexp '^(torch|triton)==' constraints.txt > $(NEWEST)/constraints.txt
	@$(NEWEST)/bin/python -m pip --disable-pip-version-check install --upgrade \
		--constraint $(NEWEST)/constraints.txt torch --editable '.[dev,images]'
	@touch $@
