# Everything that one does with this repository, by one word each. `make help` lists them.
.DEFAULT_GOAL := help
SHELL := /bin/bash

CARGO ?= cargo
VENV := .venv
VENV311 := .venv311
BINARY := target/release/waystation

.PHONY: help build demo test smoke conformance bench fmt lint doc soak clean venv venv311 need-cargo

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

need-cargo:
	@command -v $(CARGO) >/dev/null || { echo "make: no cargo on PATH: install Rust (stable, 1.88 or newer) from https://rustup.rs" >&2; exit 1; }

build: need-cargo ## build the waystation binary (target/release/waystation)
	$(CARGO) build --release --locked --bin waystation

venv: ## .venv: the newest of Python 3.13, 3.12, 3.11 with the pinned packages
	@requirements/make_venv.sh $(VENV) 3.13 3.12 3.11

venv311: ## .venv311: Python 3.11 with the newest JAX for it, the second version that the tests run
	@requirements/make_venv.sh $(VENV311) 3.11

demo: build venv ## train on Waystation: cold, warm from the bucket, cold again, one constant changed
	$(VENV)/bin/python examples/demo.py --binary $(BINARY)

test: ## every check: format, lints, docs, Rust tests, Python end-to-end tests; ends in a summary
	@tests/tools/run_checks.sh

SMOKE_JAX ?= 0.8.3 0.9.2 0.10.2 0.11.2
smoke: build ## the client programs with the older JAX versions; SMOKE_JAX=0.8.3 for one
	@tests/tools/smoke.sh $(SMOKE_JAX)

SET ?= open
JAX ?= 0.11.1
HARNESS ?= ../shared/tools/conformance
conformance: build venv ## JAX's own tests: make conformance JAX_SRC=DIR [SET=quick|open] [JAX=0.12.0.1] [HARNESS=DIR]
	@tests/tools/conformance.sh $(BINARY) "$(JAX_SRC)" "$(HARNESS)" $(SET) $(JAX)

bench: build venv ## speed against native JAX and a null server on this machine; a table, and JSON in bench-results/
	$(CARGO) build --release --locked --bin null_server --bin load --bin cache_bench --bin checkpoint_bench --bin gang_bench --bin loopback_bench --bin gcs_double
	$(VENV)/bin/python tests/bench/bench.py --binary $(BINARY)

fmt: need-cargo ## format the Rust code
	$(CARGO) fmt --all

lint: need-cargo ## clippy, warnings are errors
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings

doc: need-cargo ## the Rust documentation, warnings are errors
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --locked

soak: build venv ## the slow tests: property tests with many cases, fuzzed requests in full, end-to-end tests marked slow
	PROPTEST_CASES=20000 WAYSTATION_SOAK=1 $(CARGO) test --workspace --locked
	WAYSTATION_FUZZ_REQUESTS=100000 $(CARGO) test --locked -p waystation-tests --test fuzz -- --nocapture
	WAYSTATION_FUZZ_REQUESTS=100000 WAYSTATION_ABUSE_SESSIONS=1000 $(CARGO) test --locked -p waystation-cli --test abuse -- --nocapture
	$(VENV)/bin/python -m pytest -q tests/python -m "slow or not slow"

clean: ## remove build outputs and virtual environments
	rm -rf target $(VENV) $(VENV311) .venv-jax* bench-results
