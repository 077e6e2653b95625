# `make demo` and `make test` work from a fresh clone: they make an environment of their own first.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2

.PHONY: demo test lint types docs bench test-upstream clean

define install  # $(1): the extra
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(1)]'
	touch $@
endef

$(VENV)/.%: pyproject.toml constraints.txt
	$(call install,$*)

demo: $(VENV)/.demo  ## train a byte-level GPT plain and checkpointed, and compare
	$(BIN)/python examples/byte_gpt.py --out demo

test: $(VENV)/.test $(VENV)/.models  ## every test that needs no accelerator; those that need one run where there is one
	$(BIN)/python -m pytest -n $(JOBS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.lint
	$(BIN)/mypy

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/.bench $(VENV)/.models  ## the figures in README.md and in docs: overhead, choosing, planning-measured
	$(BIN)/python benchmarks/overhead.py --out benchmarks/results
	$(BIN)/python benchmarks/selective.py --out benchmarks/results
	$(BIN)/python benchmarks/frontier.py --compile gpt --out benchmarks/results --page docs/planning-measured.md

test-upstream: $(VENV)/.test  ## PyTorch's own checkpoint tests on the drop-in: make test-upstream TORCH_SRC=a/checkout
	$(BIN)/python benchmarks/upstream.py "$(TORCH_SRC)" --out benchmarks/results

clean:
	rm -rf $(VENV) build dist site demo
