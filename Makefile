# Needs python3 (3.11 or newer) with venv. Another interpreter: make PYTHON=python3.12 ...
PYTHON ?= python3

# All paths are relative: the folder's own path may hold spaces, which make cannot write in a target.
BIN := .venv/bin
READY := .venv/ready

# Expanded only while installing. A machine without a CUDA device takes the CPU build of torch, from PyTorch's own
# index where that answers, else from wherever pip is configured to look.
CUDA = $(shell test -e /dev/nvidia0 || nvidia-smi --list-gpus >/dev/null 2>&1 && echo yes)
CPU_INDEX = https://download.pytorch.org/whl/cpu
ANSWERS = timeout 5 $(PYTHON) -c 'import urllib.request as r; r.urlopen("$(CPU_INDEX)/torch/", timeout=3)'
CPU_TORCH = --constraint constraints/cpu.txt $(shell $(ANSWERS) 2>/dev/null && echo --extra-index-url $(CPU_INDEX))
TORCH = $(if $(CUDA),,$(CPU_TORCH))

# Packages with modules that neither the program nor its tests import, or few of them: nearly half of all.
SELDOM = /(_inductor|fontTools|mypyc?|networkx|pip|setuptools|tests?|testing|transformers/models)/

# Containers often set it; then each of the hundreds of processes that tests start would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-long bench bench-gpu storm fuzz chart docs coverage lint format clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 11

demo: $(READY)  ## tune and train a tiny model on this machine
	$(BIN)/python examples/tiny-internvl/generate.py
	$(BIN)/autotune run examples/tiny-internvl/job.yaml

# Tests wait for ranks and clocks, so there is one worker more than cores. A
# file's tests run in one worker, in order.
WORKERS = $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PARALLEL = --numprocesses $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: lint  ## run every check, and every test but the long ones
	$(BIN)/python -m pytest $(PARALLEL) -m "not long"

test-long: lint  ## run every check and every test; some ninety minutes on two cores
	$(BIN)/python -m pytest $(PARALLEL)

bench: $(READY)  ## run every benchmark; each prints one JSON object, together some four hours
	status=0; for name in packing simulator solver first_trial prediction search other_forms tuning training planted_causes certainty parallel cluster \
			cases.reductions cases.overlap cases.compiled cases.patch_embedding cases.head cases.selective cases.selective_plans cases.sharded_exchanges cases.zero_bubble \
			database people html_report exports fuzz; do \
		$(BIN)/python -m benchmarks.$$name || status=1; done; exit $$status

bench-gpu: $(READY)  ## on a machine with GPUs: check and measure them in half an hour, and write docs/benchmarks/gpu.md
	$(BIN)/python -m benchmarks.gpu

storm: $(READY)  ## kill, race, lock, fill and damage the database in full; some twenty minutes
	$(BIN)/python -m benchmarks.database

fuzz: $(READY)  ## give 20,000 hostile files to the commands; some forty minutes on two cores
	$(BIN)/python -m benchmarks.fuzz

chart: $(READY)  ## draw the README's chart from docs/benchmarks/tuning.json, the figures of docs/imbalances.md, the floors of docs/architecture.md, the types of docs/models.md
	$(BIN)/python -m benchmarks.output.chart
	$(BIN)/python -m benchmarks.figures
	$(BIN)/python docs/floors.py
	$(BIN)/python docs/model_types.py

docs: $(READY)  ## build the documentation as a site in build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

coverage: $(READY)  ## run every test with branch coverage, ranks included
	$(BIN)/python -m pytest --cov --cov-report=term

lint: $(READY)  ## check layout, style, types and the direction of imports
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy --num-workers auto
	$(BIN)/lint-imports

format: $(READY)  ## lay the code out and mend what can be mended by itself
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:  ## delete everything that make and the tools built, .venv included
	rm -rf .venv build dist *.egg-info .coverage* htmlcov
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): setup.cfg pyproject.toml constraints/cpu.txt
	$(PYTHON) -m venv .venv
	-$(BIN)/python -m pip install --quiet --upgrade pip  # the pip of Python 3.11 takes twice as long to choose versions
	$(BIN)/python -m pip install --no-compile $(TORCH) --editable '.[postgres,tables,test]'
	$(BIN)/python -W ignore -m compileall -qq -j 0 -x '$(SELDOM)' .venv/lib || true  # on all cores; pip uses one
	touch $(READY)
