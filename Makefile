# `make demo` and `make test` work from a fresh clone: they make an environment of their own first.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Without bytecode: Python writes that of what it imports, and that of the rest would take as long as the installation.
# Where the environment forbids that, each of the hundreds of processes in the tests would compile torch's Python again.
export PYTHONDONTWRITEBYTECODE :=
INSTALL := install --disable-pip-version-check --no-compile
JOBS ?= 2
# A test process a core: more threads would only wait for each other.
TEST := OMP_NUM_THREADS=1

# torch_xla goes with one torch, and is large: an environment of its own, kept for the user, one for each set of pins.
XLA_PINS := requirements-xla.txt requirements-xla-tests.txt
XLA := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/reactivate/xla-$(shell cat $(XLA_PINS) | cksum | cut -d ' ' -f 1)
# The compiler of TPUs, which needs none, in an environment without torch: 1.3 GB.
TPU := $(dir $(XLA))tpu-$(shell cksum < requirements-tpu.txt | cut -d ' ' -f 1)
IN_XLA := PYTHONPATH=$(CURDIR) PJRT_DEVICE=CPU TPU_PYTHON=$(TPU)/bin/python $(XLA)/bin/python

# The newest torch, in an environment of its own as well. `make test-newest TORCH=` takes what pip offers that day.
TORCH ?= 2.14.1
NEWEST := $(dir $(XLA))newest-$(shell (echo $(TORCH); cat constraints.txt) | cksum | cut -d ' ' -f 1)

.PHONY: gpu demo test test-all test-gpu test-public test-fenced xla test-xla test-oldest test-oldest-engine newest test-newest test-newest-engine torches refresh lint types package docs campaign mutants fuzz bench bench-distributed bench-estimators bench-gpu bench-torches bench-xla test-upstream test-deepspeed clean

$(VENV)/.pip:  # dependency groups need a newer one than Python brings
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip $(INSTALL) --quiet --upgrade 'pip>=25.1'
	touch $@

$(VENV)/.%: pyproject.toml constraints.txt | $(VENV)/.pip  # a dependency group of that name
	$(BIN)/pip $(INSTALL) --quiet --constraint constraints.txt --editable '.[all]' --group $*
	touch $@

demo: $(VENV)/.demo  ## train a byte-level GPT plain and checkpointed, and compare
	$(BIN)/python examples/byte_gpt.py --out demo

test: $(VENV)/.test  ## the first tier: what a change is checked with, in four minutes on two cores
	$(TEST) $(BIN)/python -m pytest -n $(JOBS)

test-all: $(VENV)/.test $(VENV)/.models  ## the second tier: all else that a CPU can run
	$(TEST) $(BIN)/python -m pytest -n $(JOBS) --all -m second

ENGINE := $(addprefix tests/region/test_,$(addsuffix .py,exact autograd exceptions interrupts memory visibility nested_storage)) \
	$(addprefix tests/snapshot/test_,$(addsuffix .py,modules arguments mutation own_writes)) \
	$(addprefix tests/guards/test_,$(addsuffix .py,rng rng_devices ambient)) \
	$(addprefix tests/saved_calls/test_,$(addsuffix .py,saved_sites saved_sites_kept saved_functions nested_sites)) \
	$(addprefix tests/dropin/test_,$(addsuffix .py,architectures dropin_torch dropin_torch_options)) \
	$(addprefix tests/random_programs/test_,$(addsuffix .py,property))

test-fenced: $(VENV)/.test $(VENV)/.models  ## the engine's tests, as if the CPU were a device whose compiler needs a fence
	$(TEST) $(BIN)/python -m pytest -n $(JOBS) --wide --fenced $(ENGINE)

test-gpu: $(VENV)/.test  ## what names CUDA, torch's tables and random programs, on a GPU
	$(BIN)/python -m pytest --wide -m gpu
	$(TEST) $(BIN)/python -m pytest -n $(JOBS) --wide --device cuda tests/region/test_ops.py tests/region/test_module_table.py
	$(TEST) $(BIN)/python -m fuzz --device cuda --count 2000 --seed 1 --workers $(JOBS)

test-public: $(VENV)/.test $(VENV)/.models  ## the engine's tests without what has a public way beside it: the same bits, slower
	$(TEST) PYTHONPATH=tests $(BIN)/python -m pytest -n $(JOBS) --wide -p public_ways $(ENGINE)

$(XLA)/.installed:  # no prerequisites: another set of pins is another directory
	rm -rf $(XLA)
	$(PYTHON) -m venv $(XLA)
	$(XLA)/bin/pip $(INSTALL) --quiet --no-deps --requirement requirements-xla.txt
	$(XLA)/bin/pip $(INSTALL) --quiet --constraint requirements-xla.txt --requirement requirements-xla-tests.txt
	touch $@

$(TPU)/.installed:
	rm -rf $(TPU)
	$(PYTHON) -m venv $(TPU)
	$(TPU)/bin/pip $(INSTALL) --quiet --no-deps --requirement requirements-tpu.txt
	touch $@

xla: $(XLA)/.installed $(TPU)/.installed  ## the environments of torch_xla and of the compiler of TPUs: 7 GB once

test-xla: xla  ## regions on XLA's CPU device, and compiled for a TPU
	$(TEST) $(IN_XLA) -m pytest -n $(JOBS) tests_xla

WITHOUT_TITAN := --ignore tests/recipe  # torchtitan needs a newer torch

test-oldest: $(XLA)/.installed  ## both tiers, but for slow tests, on the oldest torch that is supported
	$(TEST) $(IN_XLA) -m pytest -n $(JOBS) --wide $(or $(TESTS),$(WITHOUT_TITAN))

test-oldest-engine: TESTS = $(ENGINE)
test-oldest-engine: test-oldest  ## those of the engine only

$(NEWEST)/.installed: $(if $(TORCH),,refresh)
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	grep -v '^torch==' constraints.txt > $(NEWEST)/constraints.txt
	@echo 'Downloads about 3.2 GB: torch $(TORCH) with the CUDA libraries that it asks for on Linux (3.0 GB), and the libraries'
	@echo 'of the tests. An hour on a slow line, and once: they stay in $(NEWEST).'
	$(NEWEST)/bin/pip $(INSTALL) --quiet --upgrade 'pip>=25.1'
	$(NEWEST)/bin/pip $(INSTALL) --upgrade torch$(TORCH:%===%) \
		--constraint $(NEWEST)/constraints.txt '.[all]' --group test --group models
	$(NEWEST)/bin/pip uninstall --quiet --yes reactivate  # what runs is the package of this directory
	touch $@

newest: $(NEWEST)/.installed  ## the environment of the newest torch: downloads 3.2 GB once

test-newest: newest  ## the same on the newest torch, or on another one: TORCH=2.11.0
	$(TEST) PYTHONPATH=$(CURDIR) $(NEWEST)/bin/python -m pytest -n $(JOBS) --wide $(TESTS)

test-newest-engine: TESTS = $(ENGINE)
test-newest-engine: test-newest  ## those of the engine only

torches: $(VENV)/.test $(VENV)/.models $(XLA)/.installed $(NEWEST)/.installed  ## the table in docs/torches.md
	$(BIN)/python benchmarks/torches.py --jobs $(JOBS) --page docs/torches.md $(XLA)/bin/python -- $(WITHOUT_TITAN)
	$(BIN)/python benchmarks/torches.py --jobs $(JOBS) --page docs/torches.md $(BIN)/python $(NEWEST)/bin/python
	$(BIN)/python benchmarks/torches.py --jobs $(JOBS) --page docs/torches.md --public $(BIN)/python $(NEWEST)/bin/python -- $(ENGINE)

campaign: $(VENV)/.test mutants  ## what runs for hours: 100,000 random programs in as many sittings as it takes: make campaign SECONDS=3600
	$(TEST) $(BIN)/python -m fuzz --record benchmarks/results/fuzzing.json --page docs/fuzzing.md --count 100000 $(if $(SECONDS),--seconds $(SECONDS)) --workers $(JOBS)

mutants: $(VENV)/.test $(VENV)/.models  ## which tests kill which mutants of the core, and the table: hours, and goes on where it was stopped
	$(TEST) $(BIN)/python tests/kill_mutants.py --jobs $(JOBS)

fuzz: $(VENV)/.test  ## random training programs, plain and checkpointed: make fuzz SECONDS=600, COUNT=2000, SEED=7
	$(TEST) $(BIN)/python -m fuzz $(if $(SECONDS),--seconds $(SECONDS)) $(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED)) --workers $(JOBS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.lint
	$(BIN)/mypy

package: $(VENV)/.package $(VENV)/.demo  ## the wheel: built, checked, and used outside of this directory
	rm -rf dist build/wheel
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(BIN)/pip $(INSTALL) --quiet --no-deps --target build/wheel dist/*.whl
	cd build && PYTHONPATH=wheel $(abspath $(BIN))/python -m reactivate doctor
	cd build && PYTHONPATH=wheel $(abspath $(BIN))/python $(CURDIR)/examples/byte_gpt.py --help > /dev/null

docs: $(VENV)/.docs  ## the site; fails with any warning, which --quiet would hide from --strict
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/.bench $(VENV)/.models  ## the figures in README.md and in docs: overhead, choosing, offload, planning-measured
	$(BIN)/python benchmarks/overhead.py --out benchmarks/results
	$(BIN)/python benchmarks/self_check.py --out benchmarks/results
	$(BIN)/python benchmarks/planning.py --out benchmarks/results
	$(BIN)/python benchmarks/selective.py --out benchmarks/results
	$(BIN)/python benchmarks/offload.py --out benchmarks/results
	$(BIN)/python benchmarks/optimum.py --out benchmarks/results
	$(BIN)/python benchmarks/architectures.py --again all --out benchmarks/results
	$(BIN)/python benchmarks/frontier.py --by-block --out benchmarks/results
	$(BIN)/python benchmarks/frontier.py --compile gpt --out benchmarks/results --page docs/planning-measured.md

bench-distributed: $(VENV)/.test  ## the tables in docs/distributed.md, on processes of gloo: three minutes
	$(TEST) $(BIN)/python benchmarks/collectives.py --out benchmarks/results
	$(TEST) $(BIN)/python benchmarks/sharded.py --out benchmarks/results

bench-estimators: $(VENV)/.test  ## the table in docs/sharded-planning.md, beside torch's estimators
	$(BIN)/pip $(INSTALL) --quiet --constraint constraints.txt pulp pwlf
	$(TEST) $(BIN)/python benchmarks/estimators.py --out benchmarks/results --page docs/sharded-planning.md

ON_GPU := --device cuda --clock wall --out benchmarks/results

gpu: $(VENV)/.bench $(VENV)/.test  ## what waits for a GPU, in nine minutes: tests, random programs, figures; again to go on
	$(BIN)/python benchmarks/gpu.py

bench-gpu: $(VENV)/.bench $(VENV)/.models  ## the figures in docs/gpu.md, on a GPU
	$(BIN)/python benchmarks/overhead.py $(ON_GPU)
	$(BIN)/python benchmarks/selective.py $(ON_GPU)
	$(BIN)/python benchmarks/offload.py $(ON_GPU)
	$(BIN)/python benchmarks/frontier.py $(ON_GPU) --page docs/planning-measured.md

bench-torches: $(VENV)/.bench $(NEWEST)/.installed  ## the table in docs/overhead.md: the newest torch, and public names only
	PYTHONPATH=$(CURDIR) $(NEWEST)/bin/python benchmarks/overhead.py --quick --out benchmarks/results
	$(BIN)/python tests/public_ways.py benchmarks/overhead.py --quick --out benchmarks/results

bench-xla: $(XLA)/.installed $(TPU)/.installed  ## the figures in docs/xla-measured.md, docs/tpu-measured.md and docs/xla-models.md
	$(IN_XLA) benchmarks/xla.py --out benchmarks/results --page docs/xla-measured.md
	rm -f benchmarks/results/tpu-ahead-of-time.json
	$(IN_XLA) benchmarks/tpu.py --out benchmarks/results --page docs/tpu-measured.md
	rm -f benchmarks/results/xla-models.json
	$(IN_XLA) benchmarks/xla_models.py --out benchmarks/results --page docs/xla-models.md

test-upstream: $(VENV)/.test  ## PyTorch's own checkpoint tests on the drop-in: make test-upstream TORCH_SRC=a/checkout
	$(BIN)/python benchmarks/upstream.py "$(TORCH_SRC)" --out benchmarks/results

test-deepspeed: $(VENV)/.test  ## DeepSpeed's own checkpoint tests on the drop-in: make test-deepspeed DEEPSPEED_SRC=a/checkout
	$(BIN)/pip $(INSTALL) --quiet --constraint constraints.txt deepspeed
	$(BIN)/python benchmarks/deepspeed_tests.py "$(DEEPSPEED_SRC)" --out benchmarks/results

clean:
	rm -rf $(VENV) build dist site demo
