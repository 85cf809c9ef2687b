# Works from any clone: everything lives in .venv; `make help` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCH := torch==2.13.0
STEPS ?= 200
# the ranks of a test share few cores; without this each takes all of them
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# DeepSpeed warns in each process that it finds no accelerator, unless it is told that there is none
QUIET := $(if $(wildcard /dev/nvidia0 /dev/kfd /dev/dri /dev/accel),,DS_ACCELERATOR=cpu)
RUFF := .ci/ruff.toml
PYTEST := $(BIN)/python -m pytest
PARALLEL := -n logical --maxprocesses 8 --dist worksteal
# two launches of ranks side by side: while one waits, imports in a single process or exports, the other has the cores
RANKS := -n 2 --dist loadfile
FREE_PORT = $$("$(CURDIR)/$(BIN)/python" -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])")

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: venv
venv: $(READY) ## Make .venv with everything, and build the C++ extensions (once)

$(READY): setup.cfg .ci/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 10), (3, 11)))' 2>/dev/null || \
	  { echo "error: $(PYTHON) is not Python 3.10 or 3.11: apt-get install python3.11, then: make PYTHON=python3.11 $(or $(MAKECMDGOALS),venv)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys, sysconfig; sys.exit("musl" in (sysconfig.get_config_var("HOST_GNU_TYPE") or ""))' || \
	  { echo "error: $(PYTHON) is built for musl (Alpine); torch and onnxruntime-training have wheels for glibc only: use Debian, Ubuntu or the like" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: $(PYTHON) cannot make virtual environments: apt-get install python3-venv" >&2; exit 1; }
	@command -v $(or $(firstword $(CXX)),g++) >/dev/null || { echo "error: no C++ compiler: apt-get install g++" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.isfile(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' || \
	  { echo "error: no Python.h: apt-get install python3-dev" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing torch and the other packages into $(VENV) (some hundred MB, minutes)"
	@# torch on its own, at one version: anything newer drags in gigabytes of CUDA
	@$(BIN)/python -m pip install -qq '$(TORCH)'
	@$(BIN)/python -m pip install -qq -c .ci/constraints.txt -e '.[ort,examples,test,lint]'
	@$(BIN)/python -m ort_zero build
	@touch $@

.PHONY: train
train: $(READY) ## Train a small GPT-2 on 2 ranks under ZeRO-3 in ONNX Runtime (STEPS=200), aggregate, sample
	@$(QUIET) PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m deepspeed.launcher.runner --quiet --num_gpus 2 --master_port $(FREE_PORT) \
	  examples/train_lm.py --deepspeed_config configs/zero3.json --steps $(STEPS) --out out/train --expect-ort --compare-torch 20
	@$(BIN)/python -m ort_zero aggregate out/train out/train_model --overwrite
	@$(BIN)/python examples/sample_lm.py out/train_model

.PHONY: compare
compare: $(READY) ## Train 5 steps in ONNX Runtime and in PyTorch, and say where the two begin to differ
	@for backend in torch ort; do \
	  $(QUIET) PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m deepspeed.launcher.runner --quiet --num_gpus 2 --master_port $(FREE_PORT) examples/train_lm.py \
	    --deepspeed_config configs/zero3_statistics_$$backend.json --steps 5 || exit 1; \
	done
	$(BIN)/python -m ort_zero stats compare out/statistics/torch out/statistics/ort --html out/statistics/report.html

# the HTML report's test opens it in a browser, which no package index has
.PHONY: browser
browser:
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null 2>&1 && \
	  { command -v chromedriver || command -v chromium.chromedriver; } >/dev/null 2>&1 && exit 0; \
	as=; [ "$$(id -u)" = 0 ] || as="sudo -n"; \
	if command -v apt-get >/dev/null && { [ -z "$$as" ] || sudo -n true 2>/dev/null; }; then \
	  echo "installing chromium for the test of the HTML report"; \
	  { $$as apt-get update -qq && $$as env DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -qq --no-install-recommends chromium chromium-driver; } >/dev/null 2>&1 && exit 0; \
	fi; \
	echo "no headless browser, so the test of the HTML report will fail: apt-get install chromium chromium-driver" >&2

.PHONY: test
test: $(READY) browser ## Run the tests of plugin, checkpoints, statistics, hooks, ranks, commands and pages (15 minutes)
	$(PYTEST) -m "not slow" $(PARALLEL) tests/unit tests/contract; one=$$?; $(PYTEST) -m "not slow" $(RANKS) tests/dist && exit $$one

.PHONY: test-fast
test-fast: $(READY) ## Run the unit tests of what needs no torch, in less than a minute
	$(PYTEST) -m "not slow" --without-torch $(PARALLEL) tests/unit

.PHONY: test-ortmodule
test-ortmodule: $(READY) ## Run every test of the engine of onnxruntime-training but the slow ones (half an hour)
	$(PYTEST) -m "not slow" $(PARALLEL) tests/ortmodule/unit tests/ortmodule/contract; one=$$?; \
	$(PYTEST) -m "not slow" $(RANKS) tests/ortmodule/dist && exit $$one

.PHONY: test-smoke
test-smoke: $(READY) ## Run a few tests of the engine of onnxruntime-training (5 minutes)
	$(PYTEST) -m smoke $(RANKS) tests/ortmodule

.PHONY: test-slow
test-slow: $(READY) ## Run the tests that take minutes
	$(PYTEST) -m slow --timeout 1800 $(RANKS) tests

.PHONY: test-all
test-all: $(READY) browser ## Run all of these: test, test-ortmodule, test-slow
	@status=0; for target in test test-ortmodule test-slow; do $(MAKE) --no-print-directory $$target || status=1; done; exit $$status

# An environment of their own on top of the other: what these packages bring must not change what the other tests run with
CLIENTS := $(VENV)/clients
CLIENTS_READY := $(CLIENTS)/.ready

$(CLIENTS_READY): $(READY) setup.cfg .ci/constraints.txt
	@echo "installing the packages of the extra clients into $(CLIENTS) (some hundred MB, minutes)"
	@$(BIN)/python -m venv --clear $(CLIENTS)
	@$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_paths()['purelib'])" \
	  > "$$($(CLIENTS)/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/below.pth"
	@$(CLIENTS)/bin/python -m pip install -qq -c .ci/constraints.txt -e '.[clients]'
	@echo "starting 2 ranks for the first time: DeepSpeed compiles an operator, Python all packages"
	@$(CLIENTS)/bin/python tests/clients/first_start.py
	@touch $@

.PHONY: test-clients
test-clients: $(CLIENTS_READY) ## Run programs of other libraries in PyTorch and in ORT, 2 ranks; writes docs/programs.md
	$(CLIENTS)/bin/python -m pytest -m clients $(RANKS) tests/clients

# what an earlier run has exported must not be what is measured
bench bench-check readme-figures: export ORT_ZERO_EXPORT_CACHE := 0

.PHONY: bench
bench: $(READY) ## Run every benchmark
	@for file in $(filter-out benchmarks/zoo_models.py benchmarks/model_zoo.py benchmarks/training_models.py benchmarks/bench_check.py benchmarks/soak.py benchmarks/soak_training.py,$(wildcard benchmarks/*.py)); do echo "== $$file"; $(BIN)/python $$file || echo "$$file: exit status $$?"; done

.PHONY: bench-check
bench-check: $(READY) ## Hold the step's ratios to PyTorch against benchmarks/ratios.json; fails when one is lost
	$(BIN)/python benchmarks/bench_check.py

.PHONY: soak
soak: $(READY) ## Train 2,000 steps with saves, evaluations and statistics, then start 50 times: nothing may grow or be left (half an hour)
	$(BIN)/python benchmarks/soak.py --plot docs/soak.svg

.PHONY: readme-figures
readme-figures: $(READY) ## Measure these ratios anew, store them and write README's table
	$(BIN)/python benchmarks/bench_check.py --update

.PHONY: zoo
zoo: $(READY) ## Try every architecture of the model zoo, alone and under ZeRO-3; writes docs/compatibility.md
	$(BIN)/python benchmarks/model_zoo.py; one=$$?; $(BIN)/python benchmarks/model_zoo.py --zero3 && exit $$one

.PHONY: matrix
matrix: $(READY) ## Try other versions of torch, DeepSpeed, ... and Python (hours); writes docs/compatibility.md
	$(BIN)/python tests/versions/matrix.py

# in an environment on top of the other, so that nothing of the checkout is on its path
.PHONY: dist
dist: $(READY) ## Build wheel and sdist, check both, and train from another folder with the installed wheel
	@rm -rf dist build out/dist && mkdir -p out/dist
	@$(BIN)/python -m venv --clear out/dist/venv
	@out/dist/venv/bin/python -m pip install -qq build twine setuptools wheel
	@out/dist/venv/bin/python -m build . >out/dist/build.log 2>&1 || { tail -20 out/dist/build.log; exit 1; }
	@out/dist/venv/bin/python -m twine check --strict dist/*
	@$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_paths()['purelib'])" \
	  > "$$(out/dist/venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/below.pth"
	@out/dist/venv/bin/python -m pip install -qq --no-deps --force-reinstall dist/*.whl
	@cp -r examples configs out/dist/
	@cd out/dist && $(QUIET) PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH= venv/bin/python -m deepspeed.launcher.runner --quiet \
	  --num_gpus 2 --master_port $(FREE_PORT) examples/train_lm.py --deepspeed_config configs/zero3.json --steps 3 --out train --expect-ort
	@sha256sum dist/*

.PHONY: lint
lint: $(READY) ## Check the style with ruff and the types with mypy; changes nothing
	@$(BIN)/ruff check --config $(RUFF) .; one=$$?; $(BIN)/ruff format --config $(RUFF) --check . || one=$$?; $(BIN)/mypy || one=$$?; exit $$one

.PHONY: format
format: $(READY) ## Lay the code out with ruff, and repair what ruff can repair
	$(BIN)/ruff check --config $(RUFF) --fix .
	$(BIN)/ruff format --config $(RUFF) .

.PHONY: clean
clean: ## Remove what runs leave behind (.venv and the extensions' cache stay)
	rm -rf out build dist .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
