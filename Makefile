# One verb per habit; every verb sets up what it needs. `make` alone lists them.
# Some machines forbid bytecode to be kept: every process would compile all of torch anew.
unexport PYTHONDONTWRITEBYTECODE
VENV ?= .venv
PYTHON ?= python3
LOCK ?= requirements/cpu.lock
MODEL ?= demo
BIN := $(VENV)/bin
PY := $(BIN)/python
STAMP := $(VENV)/.stamp-$(notdir $(LOCK))
PYTEST := $(PY) -m pytest -q --durations=8
# Whoever has nothing left takes half of what another has left.
SHARED := --dist worksteal
# Of a file whole, as what it builds takes minutes; in our order, in which what is long comes first.
BY_FILE := --dist loadfile --no-loadscope-reorder
# To import the others takes each process half a minute.
SLOW = $(shell grep -rl 'mark\.slow' --include='test_*.py' tests | sort)
CLIENTS := tests/conformance/clients
ENVIRONMENTS := $(patsubst $(CLIENTS)/%/requirements.txt,.clients/%/.stamp,$(wildcard $(CLIENTS)/*/requirements.txt)) \
  $(patsubst %/package-lock.json,%/node_modules/.stamp,$(wildcard $(CLIENTS)/*/package-lock.json examples/*/package-lock.json)) \
  build/grpc_cpp/chat

.PHONY: help setup proto fmt check types rules test test-conformance environments test-slow test-gpu serve bench docs lock
help: ## list the verbs
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile

setup: $(STAMP) ## create .venv from the lock file (LOCK=requirements/gpu.lock for CUDA)
$(STAMP): $(LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 setup"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "Python has no venv module: install it, on Debian and Ubuntu with 'apt-get install python3-venv'"; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing $(LOCK) into $(VENV) ..."
	@$(PY) requirements/install.py $(PY) $(LOCK)
	@$(PY) -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

proto: setup ## regenerate tidemill/v1 and tidemill/oip from proto/
	$(BIN)/buf lint
	$(PY) -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. --grpc_python_out=. proto/tidemill/*/*.proto

fmt: setup ## format and sort imports
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format --quiet .

check: setup ## style, types and the rules of the house
	@$(MAKE) -j2 -Otarget --no-print-directory types rules

types:
	$(BIN)/mypy
rules:
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(PYTEST) tests/arch

test: check ## check, then every test that is neither slow nor needs a GPU
	$(PYTEST) -n 2 $(SHARED) -m "not slow and not gpu and not conformance" --ignore=tests/arch tests

test-conformance: setup ## real client libraries, each in an environment of its own, and all examples
	@$(MAKE) -j2 --no-print-directory environments
	$(PYTEST) -n 2 -m conformance tests/conformance

environments: $(ENVIRONMENTS)
.clients/%/.stamp: $(CLIENTS)/%/requirements.txt
	@echo "installing $< into $(@D) ..."
	@$(PYTHON) -m venv --clear --without-pip $(@D)
	@$(PY) requirements/install.py $(@D)/bin/python $<
	@touch $@
%/node_modules/.stamp: %/package-lock.json
	@echo "installing $< into $(@D) ..."
	@npm ci --prefix $* --silent --ignore-scripts
	@touch $@
build/grpc_cpp/chat: $(wildcard examples/grpc_cpp/* proto/tidemill/v1/*)
	@echo "building $@ ..."
	@cmake -S examples/grpc_cpp -B $(@D) >/dev/null
	@MAKEFLAGS= cmake --build $(@D) >/dev/null
	@touch $@

test-slow: setup ## long tests (soaks, the wheel, images), then promised figures by themselves
	$(PYTEST) -n 2 $(BY_FILE) -m "slow and not gpu and not alone" --timeout=600 $(SLOW)
	$(PYTEST) -m "slow and not gpu and alone" --timeout=600 $(SLOW)

test-gpu: setup ## tests that need a CUDA device
	$(PYTEST) -m gpu --timeout=600 tests

serve: setup ## serve a built-in model (MODEL=demo-block for block diffusion)
	$(BIN)/tidemill serve $(MODEL)

bench: setup ## the CPU benchmarks
	$(BIN)/tidemill bench throughput
	$(BIN)/tidemill bench stack

docs: setup ## regenerate docs/configuration.md
	$(PY) docs/generate.py

lock: ## resolve the dependencies anew and rewrite requirements/*.lock
	requirements/resolve
