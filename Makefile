# Everything here works in a bare clone with python3 (3.11 or newer) and make, as root or as a plain user.
PYTHON ?= python3
WORKERS ?= 2
# Their versions are in constraints-oldest.txt and so on; `make test` takes constraints.txt.
TORCHES ?= oldest newest
TORCH_TESTS := tests/dist tests/kernels tests/codecs
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
NATIVE := -DCMAKE_BUILD_TYPE=Release
COMMA := ,
INCLUDE := 'import sysconfig; print(sysconfig.get_path("include"))'
CMAKE = $$(command -v $(CURDIR)/$(BIN)/cmake || command -v cmake)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help study test lint docs bench validate fuzz sanitize quick test-large test-slow test-extras test-torch law8 native native-aarch64 release clean
MAKEFLAGS += --no-print-directory

# $(call system,TEST,PACKAGE,CONSEQUENCE): where TEST fails, install the Debian package if that can be done here, and
# otherwise say what its absence means. It never fails: what cannot do without the package says so itself.
define system
	@{ $(1); } >/dev/null 2>&1 || { \
	  if command -v apt-get >/dev/null 2>&1 && [ "$$(id -u)" = 0 ]; then \
	    echo "== installing the system package $(2)"; \
	    export DEBIAN_FRONTEND=noninteractive; \
	    apt-get install -qq -y --no-install-recommends $(2) >/dev/null 2>&1 \
	      || { apt-get update -qq && apt-get install -qq -y --no-install-recommends $(2); } >/dev/null 2>&1; \
	  fi; \
	  { $(1); } >/dev/null 2>&1 || echo "== $(2) is not installed and cannot be from here: $(3)"; \
	}
endef

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

study: $(VENV)/installed  ## does it help, and does it cost accuracy? A study in under five minutes, with a report
	@$(BIN)/narrowcast study run quick

test: $(VENV)/installed $(VENV)/dev lint docs  ## every check: ruff, mypy, the docs site, pytest
	$(call system,command -v chromium,chromium,the tests that open a report in a browser are skipped)
	@echo "== pytest"
	@$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup $(PYTEST_ARGS)

quick: $(VENV)/installed $(VENV)/dev  ## while you work: the tests of what changed since BASE (main), and a few that span all
	@$(BIN)/python tests/quick.py --base $(or $(BASE),main) --workers $(WORKERS) $(PYTEST_ARGS)

lint: $(VENV)/installed $(VENV)/dev  ## ruff and mypy
	@echo "== ruff"
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet --diff
	@echo "== mypy"
	@$(BIN)/mypy

docs: $(VENV)/installed $(VENV)/dev  ## build the docs site into site/; a broken link is an error
	@echo "== mkdocs"
	@mkdir -p build && NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict >build/docs.log 2>&1 || { cat build/docs.log; exit 1; }  # --quiet would not count warnings

bench: $(VENV)/installed $(VENV)/bench  ## speed of every codec as a share of copy_, beside its peers
	@$(BIN)/narrowcast bench codecs

validate: $(VENV)/installed  ## the predictor against published and measured data; fails where a promised figure is not reached
	@$(BIN)/narrowcast validate

fuzz: $(VENV)/installed $(VENV)/dev  ## broken wires, specs and files by the million; make fuzz COUNT=1000 SEED=7
	@PYTHONPATH=tests $(BIN)/python -m fuzz --count $(or $(COUNT),1000000) --seed $(or $(SEED),0)

sanitize: $(VENV)/installed $(VENV)/dev  ## every native kernel under the sanitizers; make sanitize CALLS=1000 SEED=7
	@mkdir -p build && $(CMAKE) -S . -B build/sanitize -DNC_SANITIZE=ON >build/sanitize.log 2>&1 || { cat build/sanitize.log; exit 1; }
	@$(CMAKE) --build build/sanitize --parallel $(WORKERS)
	@PYTHONPATH=tests $(BIN)/python -m sanitize build/sanitize/libnarrowcast_cpu.so --calls $(or $(CALLS),100000) --seed $(or $(SEED),0)

test-large: $(VENV)/installed $(VENV)/dev  ## tensors of more than 2^31 elements (about 20 GB of memory)
	@$(BIN)/python -m pytest -q -m large $(PYTEST_ARGS)

test-slow: $(VENV)/installed $(VENV)/dev  ## the long forms of tests that have a short one
	$(call system,[ "$$(uname -m)" != x86_64 ] || command -v aarch64-linux-gnu-g++,g++-aarch64-linux-gnu,the test that compiles for ARM is skipped)
	@$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup -m slow $(PYTEST_ARGS)

test-extras: $(VENV)/installed $(VENV)/dev  ## the examples for frameworks, which it installs, and every feature with a wire
	@$(PIP) -e '.[extras]' -e research
	@$(BIN)/python -m pytest -q -m extras $(PYTEST_ARGS)

test-torch: $(TORCHES:%=build/torch-%/installed)  ## what depends on torch's version, on the oldest and the newest (3 GB each to fetch)
	@status=0; for which in $(TORCHES); do \
	  python=build/torch-$$which/bin/python; log=build/torch-$$which.log; \
	  $$python -m pytest -q -n $(WORKERS) -p no:cacheprovider $(TORCH_TESTS) $(PYTEST_ARGS) >$$log 2>&1 || { status=1; cat $$log; }; \
	  echo "torch $$($$python -c 'import torch; print(torch.__version__.partition("+")[0])'): $$(tail -n 1 $$log)"; \
	done; exit $$status

law8: $(VENV)/installed $(VENV)/dev  ## error feedback loses nothing: 5000 random trainings (LAW8="--first 17 --cases 1": one again)
	@cd tests && ../$(BIN)/python -m dist.law8 $(LAW8)

native:  ## build the CPU library into the source tree, for use without an install
	$(call system,command -v c++,g++,no C++ compiler)
	@[ -n "$(CMAKE)" ] || { $(PYTHON) -m venv $(VENV) && $(PIP) cmake; }
	@mkdir -p build && $(CMAKE) -S . -B build/native $(NATIVE) >build/native.log 2>&1 || { cat build/native.log; exit 1; }
	@$(CMAKE) --build build/native --parallel $(WORKERS)
	@$(CMAKE) --install build/native --prefix src
	@ls src/narrowcast/kernels/libnarrowcast_cpu.* >/dev/null 2>&1 || { cat build/native.log; exit 1; }

native-aarch64:  ## cross-compile the CPU library for ARM: a check that it builds there
	@command -v aarch64-linux-gnu-g++ >/dev/null || { echo "aarch64-linux-gnu-g++ is missing: install g++-aarch64-linux-gnu"; exit 1; }
	@$(CMAKE) -S . -B build/aarch64 $(NATIVE) -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
	@$(CMAKE) --build build/aarch64 --parallel $(WORKERS)

release: $(VENV)/installed $(VENV)/release  ## all but the upload: checked wheels, sdists and checksums in dist/ (REHEARSE=1: only warn of what is not ready)
	@$(BIN)/python tests/release.py $(if $(REHEARSE),--rehearse)

clean:  ## remove what was built; the virtual environment stays (rm -rf .venv)
	rm -rf build site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f src/narrowcast/kernels/libnarrowcast_cpu.*
	find src research tests -name __pycache__ -type d -prune -exec rm -rf {} +

# torch is asked for by its exact version, first and alone: with the version given pip takes the small CPU build where
# one is offered, while a range would fetch the CUDA one. constraints.txt then holds it in place.
$(VENV)/torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11: make PYTHON=python3.12 ..."; exit 1; }
	$(call system,$(PYTHON) -c "import ensurepip",python3-venv,python3 -m venv needs it)
	@echo "== virtual environment and torch"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@$(PIP) -r constraints.txt
	@touch $@

# The library that `make native` may have left in the source tree is removed, so that one alone is ever found.
$(VENV)/installed: $(VENV)/torch pyproject.toml research/pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	$(call system,command -v c++,g++,the package works through its plain reference and is slower)
	@echo "== narrowcast and narrowcast-research"
	@$(PIP) -e '.[cli]' -e research
	@rm -f src/narrowcast/kernels/libnarrowcast_cpu.*
	@touch $@

$(VENV)/dev: pyproject.toml | $(VENV)/installed
	$(call system,command -v c++,g++,softposit$(COMMA) which the tests compare with$(COMMA) cannot be built)
	$(call system,[ -f "$$($(PYTHON) -c $(INCLUDE))/Python.h" ],python3-dev,softposit$(COMMA) which the tests compare with$(COMMA) cannot be built)
	@echo "== the tools for development"
	@$(PIP) -e '.[dev]' -e research
	@touch $@

# An environment by itself for each version of torch, with what it brings: its own Triton among it.
build/torch-%/installed: constraints-%.txt pyproject.toml research/pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	$(call system,command -v c++,g++,the package works through its plain reference and is slower)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11: make PYTHON=python3.12 ..."; exit 1; }
	$(call system,$(PYTHON) -c "import ensurepip",python3-venv,python3 -m venv needs it)
	$(call system,[ -f "$$($(PYTHON) -c $(INCLUDE))/Python.h" ],python3-dev,softposit$(COMMA) which the tests compare with$(COMMA) cannot be built)
	@echo "== virtual environment for the $* torch"
	@rm -rf build/torch-$* && $(PYTHON) -m venv build/torch-$*
	@build/torch-$*/bin/python -m pip install -qq --disable-pip-version-check -c constraints-$*.txt -e '.[test]' -e research
	@touch $@

$(VENV)/release: pyproject.toml | $(VENV)/installed
	@echo "== the tools for a release"
	@$(PIP) -e '.[release]' -e research
	@touch $@

$(VENV)/bench: pyproject.toml | $(VENV)/installed
	@echo "== the peers for the benchmark"
	@$(PIP) -e '.[bench]' -e research
	@touch $@
