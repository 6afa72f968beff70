# make demo   a cited answer over 20K tokens of real documents        make test   the test suite
# make check  lint, format, types                                    make test-qwen, test-browser, test-gpu   the rest

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SAMPLE := evals/ragkv_evals/data/hotpotqa_sample.jsonl

MODEL ?= qwen2.5-coder-1.5b
TOKENS ?= 20000
QUESTION ?= The Polar Bear and Daiquiri are both examples of what?

# Without a GPU the CPU build of torch is enough; with one, pip chooses.
CONSTRAINT := $(if $(shell command -v nvidia-smi),,-c constraints/cpu.txt)

.PHONY: demo test test-qwen test-browser test-gpu check install clean

demo: install
	$(BIN)/ragkv ask $(SAMPLE) "$(QUESTION)" --model $(MODEL) --context-tokens $(TOKENS)

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test-qwen: install
	$(BIN)/python -m pytest -m qwen

test-browser: install
	$(BIN)/python -m pytest -m browser

test-gpu: install
	$(BIN)/python -m pytest -m gpu

check: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints/cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "pip>=25.1,<26"
	$(BIN)/python -m pip install --quiet $(CONSTRAINT) --editable ".[all]" --group dev
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
