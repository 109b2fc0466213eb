# Every command of the project. `make` alone lists them.
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest -q
# One thread per process: with more, the small tensors of tests and demo only get slower.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# A Ray of this machine alone: on 127.0.0.1 (whatever the name says), workers at normal priority.
LOCAL_RAY := RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 RAY_worker_niceness=0 RAY_USAGE_STATS_ENABLED=0 \
	RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S=0 PYTHONPATH=$(CURDIR)
# Ray Serve shares the port with whatever program of Ray's has it already: requests would go to both.
PORT_IS_FREE := import sys; from deployments.local_s3 import is_free; \
	sys.exit(None if is_free(8000) else "make serve: something else listens on 127.0.0.1:8000")
.DEFAULT_GOAL := help
.PHONY: help setup demo serve test test-interp test-gpu memcheck test-full fmt check bench tune bench-engine bench-families

help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

setup: $(READY) ## make the virtual environment .venv and install everything into it

$(READY): pyproject.toml constraints.txt infra/setup.sh
	@infra/setup.sh $(VENV) && touch $@

demo: $(READY) ## set up, then serve three tenants from a local S3 server until Ctrl-C
	@exec $(BIN)/python -m deployments.demo $(args)

serve: $(READY) ## the service alone; args="config=FILE", or args="model=PATH lora_modules='NAME=PATH'"
	@$(BIN)/python -c '$(PORT_IS_FREE)' && flags=$$($(BIN)/python -m deployments.serve_flags) && \
	exec env $$flags $(LOCAL_RAY) $(BIN)/serve run deployments:app $(args)

test: $(READY) ## set up, then run what CI runs
	@failed=0; \
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -m "not gpu and not multigpu and not slow and not ray and not e2e" || failed=1; \
	$(PYTEST) -m "(ray or e2e) and not gpu and not multigpu and not slow" tests/deployments tests/e2e || failed=1; \
	exit $$failed

test-interp: $(READY) ## Triton kernels in the interpreter, no GPU needed
	TRITON_INTERPRET=1 $(PYTEST) -n 2 -m interp tests/kernels tests/bench

test-gpu: $(READY) ## what needs a CUDA device
	$(PYTEST) -m "gpu or multigpu"

memcheck: $(READY) ## the kernels and an engine under compute-sanitizer (needs a GPU)
	@$(BIN)/python -m tests.memcheck

test-full: $(READY) ## every test there is; those without their device are skipped
	$(PYTEST) --timeout 900

fmt: $(READY) ## format, and mend what ruff can mend
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

check: $(READY) ## lint, format, types
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

bench: $(READY) ## kernels against their roofline (needs a GPU); op=fused_moe for one
	@$(BIN)/python -m tests.bench.kernels $(op)

tune: $(READY) ## measure tile sizes on this GPU and write them; args="--shape gpt-oss-20b"
	@$(BIN)/python -m kernels.tune $(args)

bench-engine: $(READY) ## a full-size random model and 8 adapters, judged (needs a GPU); args="--phases closed,rescore"
	@$(BIN)/python -m tests.bench.engine $(args)

bench-families: $(READY) ## every family's GPU tests, and three more full shapes beside their floors; args="--seconds 450"
	@$(BIN)/python -m tests.bench.families $(args)
