# make chat needs only Python 3.11 to 3.13 and a C/C++ compiler. See make help.
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help chat test test-fast test-gpu test-agents test-clients test-cluster lint types docs requirements wheel clean force

VENV := .venv
EXTRA := dev
GPU_PYTHON := $(VENV)/bin/python
GPU_SETUP := $(VENV)/.installed-dev
AGENTS := @openai/codex opencode-ai
CLIENTS := litellm==1.110.2 lm_eval[api]==0.4.13
# another Python, if named on the command line, has an environment of its own without torch
ifeq ($(origin PYTHON),command line)
VENV := .venv-$(notdir $(PYTHON))
EXTRA := test
TESTS := @tests/without_torch.txt
# that Python itself runs the tests on a GPU
GPU_PYTHON := $(PYTHON)
GPU_SETUP :=
endif
SETUP := pyproject.toml $(wildcard requirements/*.txt) setup.py setup.sh
MODEL := localgen/models/tiny.gguf
# files in the order of tests/conftest.py
XDIST := -n 4 --dist loadfile --no-loadscope-reorder

help:
	@echo 'make chat    set up on first use (a few minutes), then chat with smollm2'
	@echo 'make test    set up for development, then run the tests; ARGS="-k name" is passed to pytest'
	@echo 'make test PYTHON=python3.13   the tests that need no torch, with another Python'
	@echo 'make test-fast   the tests of tests/fast.txt, under two minutes'
	@echo 'make test-gpu    the tests that need a GPU; PYTHON=python3 is one that has torch for CUDA, Triton,'
	@echo '                 numpy, psutil and pytest'
	@echo 'make test-agents  the tests that need coding agents, which it installs with npm and pip into .venv/agents'
	@echo 'make test-clients  the tests that need litellm and lm-evaluation-harness, which it installs into'
	@echo '                   .venv/clients: 750 MB'
	@echo 'make test-cluster  the tests that need Ray, which it installs into .venv/cluster: 500 MB'
	@echo 'make lint    check style and formatting with ruff'
	@echo 'make types   check types with mypy'
	@echo 'make docs    regenerate docs/cli.md and docs/gpu-models.md'
	@echo 'make wheel   build the wheel and its SBOM into dist/'
	@echo 'make requirements   lock the versions and hashes that are installed; ARGS=--upgrade takes newer ones'
	@echo 'make clean   remove the environment and everything built'
	@echo
	@echo 'LLAMA_WHEEL=path-or-url   use this llama-cpp-python wheel instead of compiling it; with'
	@echo '                          #sha256=hash behind it, the wheel is verified'

chat: $(VENV)/.installed $(MODEL)
	@exec $(VENV)/bin/localgen chat

test: $(VENV)/.installed-$(EXTRA) $(MODEL)
	@OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/python -m pytest -rs $(XDIST) $(TESTS) $(ARGS)

test-fast: $(VENV)/.installed-dev $(MODEL)
	@OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/python -m pytest $(XDIST) $(ARGS) @tests/fast.txt

# without tests/conftest.py, which prepares all other tests
test-gpu: $(GPU_SETUP)
	@$(GPU_PYTHON) -m pytest -rs --confcutdir=tests/gpu tests/gpu $(ARGS)

test-agents: $(VENV)/.installed-dev $(VENV)/agents/node_modules $(VENV)/agents/aider
	@OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/python -m pytest -rs tests/agents $(ARGS)

$(VENV)/agents/node_modules:
	@npm install --prefix $(VENV)/agents --no-audit --no-fund $(AGENTS)

# in an environment of its own: it pins other versions of what localgen uses
$(VENV)/agents/aider:
	@$(VENV)/bin/python -m venv $@ && $@/bin/python -m pip install --quiet aider-chat || { rm -rf $@; exit 1; }

test-clients: $(VENV)/.installed-dev $(VENV)/clients/.installed $(MODEL)
	@OMP_WAIT_POLICY=PASSIVE $(VENV)/clients/bin/python -m pytest -rs tests/test_litellm.py tests/test_lm_eval.py $(ARGS)

test-cluster: $(VENV)/.installed-dev $(VENV)/cluster/.installed $(MODEL)
	@OMP_WAIT_POLICY=PASSIVE $(VENV)/cluster/bin/python -m pytest -rs tests/test_cluster_*.py $(ARGS)

$(VENV)/clients/.installed: OVERLAY := $(CLIENTS)
$(VENV)/cluster/.installed: OVERLAY := --no-deps --require-hashes -r requirements/cluster.txt
# over the packages of the tests, because they need other versions of some; the last line marks that it is whole
$(VENV)/clients/.installed $(VENV)/cluster/.installed: Makefile requirements/cluster.txt
	@rm -rf $(@D) && $(VENV)/bin/python -m venv $(@D)
	@$(VENV)/bin/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		>"$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth"
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(OVERLAY)
	@touch $@

lint: $(VENV)/.installed-dev
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .

types: $(VENV)/.installed-dev
	@$(VENV)/bin/mypy

docs: $(VENV)/.installed-dev
	@$(VENV)/bin/python docs/cli.py
	@$(VENV)/bin/python docs/gpu_models.py

requirements:
	@$(VENV)/bin/python requirements/refresh.py $(ARGS)

wheel: $(VENV)/.installed-dev
	@rm -rf build dist
	@$(VENV)/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@$(VENV)/bin/python requirements/sbom.py dist/*.whl
	@ls dist/*

clean:
	rm -rf .venv .venv-* build dist localgen.egg-info $(MODEL) .mypy_cache .pytest_cache .ruff_cache .hypothesis

# A wheel named on the command line is installed each time, never ignored.
$(VENV)/.installed: $(SETUP) $(if $(LLAMA_WHEEL),force)
	@VENV='$(VENV)' LLAMA_WHEEL='$(LLAMA_WHEEL)' ./setup.sh

$(VENV)/.installed-%: $(SETUP) $(if $(LLAMA_WHEEL),force)
	@VENV='$(VENV)' LLAMA_WHEEL='$(LLAMA_WHEEL)' ./setup.sh $*

# Installing derives the model too (setup.py); this is for changes since.
$(MODEL): $(wildcard localgen/models/tiny/*) $(shell find quant/gguf backends/formats -name '*.py')
	@$(VENV)/bin/python -c 'from pathlib import Path; from localgen.quant.gguf.convert import convert_to_gguf; \
		convert_to_gguf(Path("localgen/models/tiny"), Path("$@"))'
