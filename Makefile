# The whole developer interface. Every target works from a clean clone, and again with what it left behind.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
# What a run imports is installed first, and alone by `make smoke`; tests, checks and docs need the extras.
RUN_STAMP := $(VENV)/.installed-run
STAMP := $(VENV)/.installed
# The first python3 that is new enough; `make PYTHON=... setup` takes another one.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
EXTRAS := dev,tensorboard,tokenizers,parquet,report,hf,lightning,remote
CORPUS := data/pytext
MATRIX := data/smoke_matrix
MATRIX_CORPORA := $(foreach name,recall short long,$(MATRIX)/$(name)/manifest.json) $(MATRIX)/mixed/cpp
# Tests wait for processes and pipes much of the time: 3 on two cores.
WORKERS ?= 3
# Tests as on a lesser processor: one for oneDNN, too, by which torch 2.13 packs what its own kernels then refuse.
ifdef ATEN_CPU_CAPABILITY
export ONEDNN_MAX_CPU_ISA ?= AVX2
endif
BENCHES := loop step gns recurrence ledger rows metrics head

export OMP_NUM_THREADS ?= 1
# Tests start hundreds of processes: without bytecode on disk each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
# Nothing here may wait for a key or a browser.
export WANDB_MODE ?= offline
export WANDB_SILENT ?= true

.PHONY: help setup data smoke smoke-matrix test test-slow test-faults golden mutants check format docs \
	bench $(addprefix bench-,$(BENCHES)) context gpu clean

help:
	@echo "make smoke      train train_configs/smoke.toml on 2 ranks, on text that your machine already has"
	@echo "make setup      create $(VENV) and install the pinned dependencies, with those of tests and docs"
	@echo "make smoke-matrix  train one healthy and three faulty configs, and check that the diagnosis tells them apart"
	@echo "make test       the test suite (make test-slow: what takes long, and repeats; CI runs both)"
	@echo "make test-faults  break real runs on purpose: kills, damage, full disks, hangs (long)"
	@echo "make golden     compare this tree's runs bit for bit with those of a commit, BASE=commit (HEAD)"
	@echo "make mutants    mutate one module, MODULE=file, and run its tests, TESTS=files, against each mutant"
	@echo "make check      lint, types, layers, generated docs, budgets, and that every test file imports"
	@echo "make format     format the code"
	@echo "make docs       regenerate the generated docs and JSON schemas"
	@echo "make bench      what the instruments cost, as ratios, into docs/benchmarks.md (make bench-loop: one of them)"
	@echo "make context    what a short window costs, into docs/context.md: 2.5 hours on two cores (SIZE=small: 20 minutes)"
	@echo "make gpu        tests and figures on one CUDA device (DEVICE=cpu: a rehearsal)"

setup: $(STAMP)

# $(call install,REQUIREMENTS): with uv where it is on PATH, otherwise, or if that fails (its settings are not pip's), with pip,
# whose errors are shown and not its warnings, such as those of a configured index that is absent.
define install
	@{ command -v uv >/dev/null && uv pip install --quiet --python $(BIN)/python -c constraints.txt $(1) >&2; } || \
		$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt $(1) >&2
endef

$(RUN_STAMP): constraints.txt pyproject.toml Makefile
	@test -n "$(PYTHON)" || { echo "no python3.11 or newer with venv found; set PYTHON=/path/to/python" >&2; exit 1; }
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "creating $(VENV) with $$($(PYTHON) --version)" >&2; rm -rf $(VENV); $(PYTHON) -m venv $(VENV); }
	@echo "installing what a run needs, as constraints.txt pins it" >&2
	$(call install,-e .)
	@touch $@

$(STAMP): $(RUN_STAMP)
	@echo "installing what tests and checks need" >&2
	$(call install,-e '.[$(EXTRAS)]')
	@touch $@

data: $(CORPUS)/manifest.json

$(CORPUS)/manifest.json: $(RUN_STAMP)
	@$(BIN)/train data build pytext --out $(CORPUS) --force >&2
	@touch $@

smoke: data
	@$(BIN)/train --nproc 2 --config train_configs/smoke.toml

smoke-matrix: setup data $(MATRIX_CORPORA)
	@$(BIN)/python scripts/smoke_matrix.py

$(MATRIX)/recall/manifest.json: GROUPS := --groups 8192
$(MATRIX)/short/manifest.json: GROUPS := --groups 4096 --cells 2 --streams 128
$(MATRIX)/long/manifest.json: GROUPS := --groups 4096 --cells 2 --streams 8
$(MATRIX)/%/manifest.json: $(RUN_STAMP)
	@$(BIN)/train data synth key-recall --out $(@D) $(GROUPS) --force >&2
	@touch $@

$(MATRIX)/mixed/cpp: $(MATRIX)/recall/manifest.json $(CORPUS)/manifest.json
	@mkdir -p $(@D)/recall $@
	@cp $(MATRIX)/recall/recall/* $(@D)/recall
	@cp $(CORPUS)/cpp/c10* $@

test: setup
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow and not faults"

test-slow: setup data $(MATRIX_CORPORA)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m slow

# One case at a time: each starts two ranks or more. The rows of docs/reliability.md are written from what happened
# in them and in the other tests that keep a record.
test-faults: setup
	@rm -rf build/faults
	@$(BIN)/python -m pytest -m faults tests
	@$(BIN)/python -m pytest $$(grep -rl --include='test_*.py' --exclude-dir=faults '^ *keep(' tests)
	@$(BIN)/python scripts/make_fault_table.py

BASE ?= HEAD
golden: setup
	@$(BIN)/python -m tests.golden.same_bits $(BASE)

# One module against its tests: make mutants MODULE=trainer/lab/extensions.py TESTS=tests/lab/training/test_spikes.py
mutants: setup
	$(call install,-e '.[mutants]')
	@$(BIN)/python scripts/mutate.py $(MODULE) $(TESTS)

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python scripts/make_docs.py --check
	@$(BIN)/python scripts/check_budgets.py
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null || { $(BIN)/python -m pytest --collect-only -q | tail -n 40 >&2; exit 1; }

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: setup
	@$(BIN)/python scripts/make_docs.py

# All of them write docs/benchmarks.md (about 15 minutes); one alone prints its table.
bench: setup
	@$(BIN)/python scripts/bench/run_all.py

$(addprefix bench-,$(BENCHES)): bench-%: setup
	@$(BIN)/python scripts/bench/bench_$*.py

# Finished runs are kept, and go on with the next call; without docs/context.json all are run.
SIZE ?= full
CONTEXT_OUT = $(if $(filter full,$(SIZE)),docs/context.json,build/context-$(SIZE).json)
CONTEXT_DEVICE = $(if $(filter device,$(SIZE)),$(DEVICE),cpu)
context: setup data
	$(call install,-e '.[figures]')
	@$(BIN)/python scripts/context.py --size $(SIZE) --device $(CONTEXT_DEVICE) --out $(CONTEXT_OUT) --work $(basename $(CONTEXT_OUT:docs/%=build/%))

# On one CUDA device, from a bare checkout and with the packages of the interpreter that PYTHON names: nothing is installed.
# PART=tests|runs|speed|models|ledger|context runs one part, CHECK=name the checks of that name; DEVICE=cpu rehearses all of it.
DEVICE ?= cuda
PART ?= all
CHECK ?=
GPU_PYTHON = $(if $(filter command% environment%,$(origin PYTHON)),$(PYTHON),$(firstword $(wildcard $(BIN)/python) $(PYTHON)))
gpu:
	@$(GPU_PYTHON) scripts/gpu/run.py --device $(DEVICE) --part $(PART) --check "$(CHECK)"

clean:
	rm -rf $(VENV) data runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
