# Works from any clone: everything lives in .venv; `make help` lists the targets.
# .venv has plain onnxruntime; .venv/ortmodule, an environment of its own, has onnxruntime-training.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TESTS_READY := $(VENV)/.tests_ready
# onnxruntime-training has wheels for Python 3.10 and 3.11 alone, and installs the same folder as onnxruntime
ORTMODULE := $(VENV)/ortmodule
ORTMODULE_BIN := $(ORTMODULE)/bin
ORTMODULE_READY := $(ORTMODULE)/.ready
ORTMODULE_PYTHON ?= $(shell for python in $(PYTHON) python3.11 python3.10; do $$python -c '$(IS_OLD)' 2>/dev/null && echo $$python && break; done)
IS_OLD := import sys; sys.exit(sys.version_info[:2] not in ((3, 10), (3, 11)))
EXTRAS := ort,examples
TESTS_EXTRAS := ort,examples,test,lint
ORTMODULE_EXTRAS := ortmodule,examples,test
TORCH := torch==2.13.0
# where pip looks for torch beside PyPI, whose torch brings CUDA: 5 GB; make TORCH_INDEX=https://download.pytorch.org/whl/cpu train
TORCH_INDEX ?=
# each environment compiles DeepSpeed's operators for itself: another environment's would be compiled again at each turn
export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(VENV)/torch_extensions
STEPS ?= 200
# the ranks of a test share few cores; without this each takes all of them
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# DeepSpeed warns in each process that it finds no accelerator, unless it is told that there is none
QUIET := $(if $(wildcard /dev/nvidia0 /dev/kfd /dev/dri /dev/accel),,DS_ACCELERATOR=cpu)
RUFF := .ci/ruff.toml
PYTEST := $(BIN)/python -m pytest
ORTMODULE_PYTEST := TORCH_EXTENSIONS_DIR="$(CURDIR)/$(ORTMODULE)/torch_extensions" $(ORTMODULE_BIN)/python -m pytest
# what is slow shows above pytest's closing line
SLOWEST := --durations=25
PARALLEL := -n logical --maxprocesses 8 --dist worksteal
# two launches of ranks side by side: while one waits, imports in a single process or exports, the other has the cores
RANKS := -n 2 --dist loadfile
ONE_PROCESS := tests/unit tests/contract tests/compile/unit tests/compile/contract
SEVERAL_RANKS := tests/dist tests/compile/dist
FREE_PORT = $$("$(CURDIR)/$(BIN)/python" -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])")

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# $(call can_make_environments,PYTHON): stop in words where that Python cannot hold torch and onnxruntime
define can_make_environments
@$(1) -c 'import sys, sysconfig; sys.exit("musl" in (sysconfig.get_config_var("HOST_GNU_TYPE") or ""))' || \
  { echo "error: $(1) is built for musl (Alpine); torch and onnxruntime have wheels for glibc only: use Debian, Ubuntu or the like" >&2; exit 1; }
@$(1) -c 'import ensurepip, venv' 2>/dev/null || \
  { echo "error: $(1) cannot make virtual environments: apt-get install python3-venv" >&2; exit 1; }
endef

# pip shows its progress on a terminal; of a $(shell) only stderr is make's own
PIP_QUIET := $(shell [ -t 2 ] || echo -qq)
# pip prefers 2.13.0+cpu of an index of CPU builds to 2.13.0 of PyPI
TORCH_FROM = $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)')
define say_download
@if $(1)/bin/python -c 'import torch' 2>/dev/null; then \
  echo "$(1) has torch already; installing what else it lacks"; \
elif [ -n "$(TORCH_INDEX)" ]; then \
  echo "downloading into $(1): torch of $(TORCH_INDEX) (a CPU build has 0.2 GB), onnxruntime, DeepSpeed, transformers and what they need (0.5 GB)"; \
else \
  echo "downloading into $(1): torch, onnxruntime, DeepSpeed, transformers and what they need: 0.7 GB if your package index has a CPU build"; \
  echo "of torch for this Python, 5 GB with CUDA from PyPI; for a CPU build: make TORCH_INDEX=https://download.pytorch.org/whl/cpu $(MAKECMDGOALS)"; \
fi
endef

# $(call install,ENVIRONMENT,PYTHON,EXTRAS); torch on its own: an unpinned one would drag in gigabytes of CUDA
define install
@$(1)/bin/python -m pip --version >/dev/null 2>&1 || \
  { rm -rf $(addprefix $(1)/,bin include lib lib64 pyvenv.cfg); $(2) -m venv $(1); }
$(call say_download,$(1))
@$(1)/bin/python -m pip install $(PIP_QUIET) $(TORCH_FROM) '$(TORCH)'
@$(1)/bin/python -m pip install $(PIP_QUIET) -c .ci/constraints.txt -e '.[$(3)]'
endef

.PHONY: venv
venv: $(TESTS_READY) ## Make .venv with everything, on plain onnxruntime; compiles nothing

$(READY): setup.cfg .ci/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null || \
	  { echo "error: $(PYTHON) is not Python 3.10 to 3.14: apt-get install python3, then: make PYTHON=python3 $(or $(MAKECMDGOALS),venv)" >&2; exit 1; }
	$(call can_make_environments,$(PYTHON))
	@# an environment of an earlier checkout: onnxruntime must not be installed over onnxruntime-training
	@if $(BIN)/python -m pip show -qq onnxruntime-training 2>/dev/null; then $(BIN)/python -m pip uninstall -qq -y onnxruntime-training onnxruntime; fi
	$(call install,$(VENV),$(PYTHON),$(EXTRAS))
	@touch $@

$(TESTS_READY): $(READY)
	@echo "installing the packages of the tests into $(VENV) (a minute)"
	@$(BIN)/python -m pip install $(PIP_QUIET) -c .ci/constraints.txt -e '.[$(TESTS_EXTRAS)]'
	@touch $@

.PHONY: ortmodule
ortmodule: $(ORTMODULE_READY) ## Make .venv/ortmodule with onnxruntime-training (Python 3.10 or 3.11)

$(ORTMODULE_READY): setup.cfg .ci/constraints.txt
	@[ -n "$(ORTMODULE_PYTHON)" ] && $(ORTMODULE_PYTHON) -c '$(IS_OLD)' 2>/dev/null || \
	  { echo "error: onnxruntime-training needs Python 3.10 or 3.11, and $(or $(ORTMODULE_PYTHON),none of $(PYTHON) python3.11 python3.10) is one: apt-get install python3.11, then: make ORTMODULE_PYTHON=python3.11 $(or $(MAKECMDGOALS),ortmodule)" >&2; exit 1; }
	$(call can_make_environments,$(ORTMODULE_PYTHON))
	$(call needs_compiler,$(ORTMODULE_PYTHON))
	@mkdir -p $(VENV)
	$(call install,$(ORTMODULE),$(ORTMODULE_PYTHON),$(ORTMODULE_EXTRAS))
	@touch $@

# DeepSpeed compiles an operator for shared memory as soon as a rank starts on CPU
define needs_compiler
@command -v $(or $(firstword $(CXX)),g++) >/dev/null || \
  { echo "error: no C++ compiler, and DeepSpeed compiles an operator of its own when a rank starts: apt-get install g++" >&2; exit 1; }
@$(1) -c 'import os, sys, sysconfig; sys.exit(3 * (not os.path.isfile(os.path.join(sysconfig.get_paths()["include"], "Python.h"))))' 2>/dev/null; \
  [ $$? != 3 ] || { echo "error: no Python.h, and DeepSpeed compiles an operator of its own when a rank starts: apt-get install python3-dev" >&2; exit 1; }
endef

.PHONY: compiler
compiler:
	$(call needs_compiler,$(or $(wildcard $(BIN)/python),$(PYTHON)))

.PHONY: say_compile
say_compile: $(READY)
	@[ -z "$(QUIET)" ] || ls "$(TORCH_EXTENSIONS_DIR)"/deepspeed_shm_comm/*.so >/dev/null 2>&1 || \
	  echo "g++ compiles an operator of DeepSpeed's, for ranks that share memory on CPU: once for $(VENV), about a minute"

.PHONY: train
train: compiler $(READY) say_compile ## Train a small GPT-2 on 2 ranks under ZeRO-3 in ONNX Runtime (STEPS=200), aggregate, sample
	@$(QUIET) PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m deepspeed.launcher.runner --quiet --num_gpus 2 --master_port $(FREE_PORT) \
	  examples/train_lm.py --deepspeed_config configs/zero3.json --steps $(STEPS) --out out/train --expect-ort --compare-torch 14
	@$(BIN)/python -m ort_zero aggregate out/train out/train_model --overwrite
	@$(BIN)/python examples/sample_lm.py out/train_model

.PHONY: compare
compare: compiler $(TESTS_READY) ## Train 5 steps in ONNX Runtime and in PyTorch, and say where the two begin to differ
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
test: compiler $(TESTS_READY) browser ## Run the tests of plugin, compile backend, checkpoints, statistics, ranks, commands and pages
	$(PYTEST) -m "not slow" $(SLOWEST) $(PARALLEL) $(ONE_PROCESS); one=$$?; \
	$(PYTEST) -m "not slow" $(SLOWEST) $(RANKS) $(SEVERAL_RANKS) && exit $$one

.PHONY: test-fast
test-fast: $(TESTS_READY) ## Run the unit tests of what needs no torch, in less than a minute; without a browser too
	$(PYTEST) -m "not slow and not seconds" --without-torch $(PARALLEL) tests/unit

.PHONY: test-ortmodule
test-ortmodule: $(ORTMODULE_READY) ## Run every test of the engine of onnxruntime-training but the slow ones (six minutes)
	$(ORTMODULE_PYTEST) -m "not slow" $(SLOWEST) $(PARALLEL) tests/ortmodule/unit tests/ortmodule/contract; one=$$?; \
	$(ORTMODULE_PYTEST) -m "not slow" $(SLOWEST) $(RANKS) tests/ortmodule/dist && exit $$one

.PHONY: test-slow
test-slow: compiler $(TESTS_READY) $(ORTMODULE_READY) ## Run the tests that take minutes
	$(PYTEST) -m slow --timeout 1800 $(RANKS) $(ONE_PROCESS) $(SEVERAL_RANKS); one=$$?; \
	$(ORTMODULE_PYTEST) -m slow --timeout 1800 $(RANKS) tests/ortmodule && exit $$one

.PHONY: test-all
test-all: browser ## Run all of these: test, test-ortmodule, test-slow
	@status=0; for target in test test-ortmodule test-slow; do $(MAKE) --no-print-directory $$target || status=1; done; exit $$status

# An environment of their own on top of the tests': what these packages bring must not change what its tests run with
CLIENTS := $(VENV)/clients
CLIENTS_READY := $(CLIENTS)/.ready

$(CLIENTS_READY): $(TESTS_READY) setup.cfg .ci/constraints.txt
	@echo "installing the packages of the extra clients into $(CLIENTS) (some hundred MB, minutes)"
	@$(BIN)/python -m venv --clear $(CLIENTS)
	@$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_paths()['purelib'])" \
	  > "$$($(CLIENTS)/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/below.pth"
	@$(CLIENTS)/bin/python -m pip install -qq -c .ci/constraints.txt -e '.[clients]'
	@touch $@

.PHONY: test-clients
test-clients: $(CLIENTS_READY) ## Run programs of other libraries in PyTorch and in ORT, 2 ranks; writes docs/compatibility.md
	TORCH_EXTENSIONS_DIR="$(CURDIR)/$(CLIENTS)/torch_extensions" $(CLIENTS)/bin/python -m pytest -m clients $(RANKS) tests/clients \
	  --deselect tests/clients/test_architectures.py

# of one machine and some minutes each; what the others measure takes longer, or options
BENCHMARKS := step_time settled_memory first_step statistics_overhead checkpoints loading aggregate torch_checkpoints
.PHONY: bench
bench: $(TESTS_READY) ## Run the benchmarks of steps, memory, starts, statistics and checkpoints
	@for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python benchmarks/$$name.py || echo "$$name: exit status $$?"; done

.PHONY: bench-check
bench-check: compiler $(TESTS_READY) ## Hold the step's ratios to PyTorch against benchmarks/ratios.json; fails when one is lost
	$(BIN)/python benchmarks/bench_check.py

.PHONY: soak
soak: compiler $(TESTS_READY) ## Train 2,000 steps with saves, evaluations and statistics, then start 50 times: nothing may grow or be left (half an hour)
	$(BIN)/python benchmarks/soak.py

.PHONY: readme-figures
readme-figures: compiler $(TESTS_READY) ## Measure these ratios anew, store them and write README's line
	$(BIN)/python benchmarks/bench_check.py --update

.PHONY: zoo
zoo: $(CLIENTS_READY) ## Try every architecture alone, a sample under ZeRO-3; writes docs/compatibility.md
	TORCH_EXTENSIONS_DIR="$(CURDIR)/$(CLIENTS)/torch_extensions" $(CLIENTS)/bin/python -m pytest -m clients -n 2 --dist worksteal \
	  tests/clients/test_architectures.py

.PHONY: matrix
matrix: $(TESTS_READY) ## Try other versions of torch, DeepSpeed, onnxruntime, ... and Python (hours); writes docs/compatibility.md
	$(BIN)/python tests/versions/matrix.py

# an environment of their own: the site needs none of the package's dependencies
SITE := $(VENV)/site
SITE_READY := $(SITE)/.ready

$(SITE_READY): setup.cfg
	@$(PYTHON) -m venv --clear $(SITE)
	@$(SITE)/bin/python -m pip install $(PIP_QUIET) "$$(sed -n '/^docs =/,/^[a-z]* =/s/^    //p' setup.cfg)"
	@touch $@

.PHONY: docs
docs: $(SITE_READY) ## Render docs/ as a site that can be read and searched offline: out/site/index.html; broken links fail
	@NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --quiet --strict --config-file .ci/mkdocs.yaml && echo "out/site/index.html"

.PHONY: reference
reference: $(TESTS_READY) ## Write docs/reference.md anew from the code
	$(BIN)/python docs/make_reference.py

.PHONY: tutorial
tutorial: compiler $(TESTS_READY) ## Run the commands of docs/tutorial.md and write their output into the page
	$(QUIET) $(BIN)/python docs/make_tutorial.py

# the training runs in an environment that has the wheel and what the wheel asks for, and nothing of the checkout
DIST := out/dist
DIST_PYTHON := $(CURDIR)/$(DIST)/venv/bin/python
WHEEL_BYTES := 700000

.PHONY: dist
dist: compiler ## Build wheel and sdist, check both, and train from another folder with the wheel in an empty environment
	@rm -rf dist build $(DIST) && mkdir -p $(DIST)
	@$(PYTHON) -m venv $(DIST)/build && $(DIST)/build/bin/python -m pip install -qq build twine
	@$(DIST)/build/bin/python -m build . >$(DIST)/build.log 2>&1 || { tail -20 $(DIST)/build.log; exit 1; }
	@$(DIST)/build/bin/python -m twine check --strict dist/*
	@[ $$(stat -c %s dist/*.whl) -le $(WHEEL_BYTES) ] || { ls -l dist; echo "error: the wheel has more than $(WHEEL_BYTES) bytes" >&2; exit 1; }
	@$(PYTHON) -m venv $(DIST)/venv
	$(call say_download,$(DIST)/venv)
	@$(DIST_PYTHON) -m pip install $(PIP_QUIET) $(TORCH_FROM) '$(TORCH)'
	@$(DIST_PYTHON) -m pip install $(PIP_QUIET) -c .ci/constraints.txt "$$(echo dist/*.whl)[$(EXTRAS)]"
	@cp -r examples configs $(DIST)/
	@cd $(DIST) && $(QUIET) PATH="$(CURDIR)/$(DIST)/venv/bin:$$PATH" PYTHONPATH= TORCH_EXTENSIONS_DIR="$(CURDIR)/$(DIST)/torch_extensions" \
	  $(DIST_PYTHON) -m torch.distributed.run --standalone --nproc_per_node 2 examples/train_lm.py --deepspeed_config configs/zero3.json --steps 3 --out train --expect-ort
	@cd $(DIST) && PYTHONPATH= $(DIST_PYTHON) -m ort_zero aggregate train model --quiet && $(DIST_PYTHON) -m ort_zero verify train
	@sha256sum dist/*

.PHONY: lint
lint: $(TESTS_READY) ## Check the style with ruff and the types with mypy; changes nothing
	@$(BIN)/ruff check --config $(RUFF) .; one=$$?; $(BIN)/ruff format --config $(RUFF) --check . || one=$$?; $(BIN)/mypy || one=$$?; exit $$one

.PHONY: format
format: $(TESTS_READY) ## Lay the code out with ruff, and repair what ruff can repair
	$(BIN)/ruff check --config $(RUFF) --fix .
	$(BIN)/ruff format --config $(RUFF) .

.PHONY: clean
clean: ## Remove what runs leave behind (.venv stays, with the operators that DeepSpeed has compiled)
	rm -rf out build dist .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
