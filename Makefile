# The commands of the README, and the installation that they need. `make help` lists the commands.
#
# The virtual environment is created once. A stamp file in it shows which extras are installed. If a
# file that declares dependencies or kernels is newer than the stamp, they are installed again.

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
# auto: torch for CUDA if NVIDIA's driver is installed, and torch for CPUs otherwise; cpu; gpu
DEVICE ?= auto
# An index of torch's builds for CPUs, such as a mirror; empty: torch's own
TORCH_CPU_INDEX ?=

BIN := $(VENV)/bin
DECLARED := setup.cfg setup.py worker/kernels/instruction_sets.py $(wildcard worker/kernels/csrc/*)

.DEFAULT_GOAL := help
.PHONY: help serve docs test test-oldest torture check clean

help:
	@echo 'make serve   install Tidegate and serve the default model;        ARGS="--port 8001" passes options on'
	@echo 'make docs    build the guide that a server shows at /docs, from the pages in docs/'
	@echo 'make test    install the test tools and run the whole suite;      ARGS="-k stream" passes options on'
	@echo '             ARGS="--repeat 3 --busy 2" runs it three times on a busy machine, to find unsteady tests'
	@echo 'make test-oldest  test streams with the oldest supported gunicorn and gevent; make test includes this'
	@echo 'make torture kill and stop every process of a server at every moment, and print the results (half an hour);'
	@echo '             then run the property tests with more random examples than make test, servers behind'
	@echo '             vllm-router and nginx, attacks,'
	@echo '             all ways to compute 200 prompts, whose bits must be the same, and coding agents (hours)'
	@echo 'make check   check format, lint and types, and run the unit tests; every change must pass'
	@echo 'make clean   remove $(VENV) and build leftovers; downloaded models stay in the cache'
	@echo "DEVICE=cpu or gpu selects the build of torch; otherwise it depends on NVIDIA's driver"

serve: $(VENV)/.installed-all
	@$(BIN)/tidegate serve $(ARGS)

docs: | $(BIN)/python
	@$(BIN)/python -c 'import furo, myst_parser' 2> /dev/null || \
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@$(BIN)/python docs/site/build.py

# All stages run, even if one fails. The last lines of output summarise them (tests/stages.py).
test: $(VENV)/.installed-test
	@$(BIN)/python -m tests.stages $(ARGS)

test-oldest: $(VENV)/.installed-test
	@$(BIN)/python -m tests.oldest $(ARGS)

# Runs every combination of process, signal and moment; `make test` runs a few of them.
torture: $(VENV)/.installed-test
	@$(BIN)/python -m tests.torture.signals $(ARGS)
	@$(BIN)/python -m tests.torture.examples
	@$(BIN)/python -m tests.torture.kill_storm
	@$(BIN)/python -m tests.torture.run_batch
	@$(BIN)/python -m tests.torture.failover
	@$(BIN)/python -m tests.torture.ray_cluster
	@$(BIN)/python -m tests.torture.templates
	@$(BIN)/python -m tests.torture.fronts
	@$(BIN)/python -m tests.benchmarks.memory_slope
	@$(BIN)/python -m tests.torture.attacks
	@$(BIN)/python -m tests.torture.images
	@$(BIN)/python -m tests.torture.mutated_kernels
	@$(BIN)/python -m tests.torture.model_types
	@$(BIN)/python -m tests.torture.same_bits
	@$(BIN)/python -m tests.torture.evex
	@$(BIN)/python -m tests.torture.arm
	@$(BIN)/python -m tests.torture.arm_server
	@$(BIN)/python -m tests.torture.draft_heads
	@$(BIN)/python -m tests.torture.custom_tools
	@$(BIN)/python -m tests.torture.agents

check: $(VENV)/.installed-test
	@PATH="$(abspath $(BIN)):$$PATH" tools/check $(ARGS)

clean:
	rm -rf $(VENV) worker/kernels/_*.so* gateway/web/guide build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The extra `test` includes `all`, so after `make test`, `make serve` has nothing to install.
$(VENV)/.installed-all: $(DECLARED) | $(BIN)/python
	@if test -e $(VENV)/.installed-test && test $(VENV)/.installed-test -nt setup.cfg; then touch $@; \
	else $(call install,all) && touch $@; fi

# These are installed without their dependencies, because their upper bounds for openai, or for jiter
# that openai requires, exclude the newest openai. The extra `test` declares those of their
# dependencies that our tests need.
BOUNDED := 'instructor>=1.17,<2' 'llama-index-llms-openai>=0.8,<0.9' \
	'llama-index-llms-openai-like>=0.8,<0.9'

$(VENV)/.installed-test: $(DECLARED) | $(BIN)/python
	@$(call install,test) && \
	$(BIN)/python -m pip install --quiet --no-deps $(BOUNDED) && touch $@

# pip would compile the byte code of 19,000 files on one core. A few of them are not valid Python.
# Files of which few are imported are left out: Python compiles each of them at its first import.
SELDOM_IMPORTED := /tests/|/transformers/models/\w+/(?!configuration_|__init__)
SELDOM_IMPORTED := $(SELDOM_IMPORTED)|/torch/(_inductor|ao|onnx|testing)/|/(torchgen|networkx)/
SELDOM_IMPORTED := $(SELDOM_IMPORTED)|/(pip|setuptools|schemathesis|langsmith)/|/mypyc?/|/pygments/lexers/
SELDOM_IMPORTED := $(SELDOM_IMPORTED)|/ray/(data|llm|rllib|serve|train|tune)/|/sympy/(physics|plotting|stats)/
SELDOM_IMPORTED := $(SELDOM_IMPORTED)|/sqlalchemy/dialects/|/agents/extensions/

# The kernels are compiled while pip downloads; pip's own build of them waits for that (setup.py).
# torch is installed first, as the build that this machine can use.
BUILD_KERNELS := $(BIN)/python setup.py build_ext --inplace --build-temp $(VENV)/build --build-lib $(VENV)/build
INSTALL_TORCH := $(BIN)/python -m tools.torch_build --device $(DEVICE) \
	$(if $(TORCH_CPU_INDEX),--cpu-index $(TORCH_CPU_INDEX))
install = echo '== Installing Tidegate and its libraries ($(1)) into $(VENV), and compiling its kernels; once, a few minutes' && \
	{ command -v c++ > /dev/null || command -v g++ > /dev/null || echo '$(NO_COMPILER)'; } && \
	{ $(BIN)/python -m pip install -qq --retries 1 --upgrade pip 'setuptools>=77' || \
	{ echo '$(NO_INDEX)' >&2; false; }; } && \
	{ $(BUILD_KERNELS) > $(VENV)/build.log 2>&1 & } && { \
	$(INSTALL_TORCH) && \
	$(BIN)/python -m pip install --progress-bar on --no-compile --editable '.[$(1)]' && wait || \
	{ echo '$(NOT_INSTALLED)' >&2; false; }; } && \
	{ $(BIN)/python -m compileall -qq -j 0 -x '$(SELDOM_IMPORTED)' $(VENV)/lib || true; }

NO_COMPILER := == There is no C++ compiler, so steps will be slower: install g++, and then run make clean serve
NO_INDEX := pip cannot get packages from its index: check the network, and PIP_INDEX_URL if you have a \
	mirror or HTTPS_PROXY for a proxy. Without a network: docs/start/installation.md
NOT_INSTALLED := Tidegate could not be installed; the reason is above

# Pythons that are new enough, and may be installed beside one that is not.
NEWER_PYTHONS := python3.14 python3.13 python3.12 python3.11

$(BIN)/python:
	@test "$$(uname -s)" = Linux || \
	{ echo 'Tidegate needs Linux. On macOS and Windows, run it in a container or in WSL 2.' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || { \
	echo "Tidegate needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2> /dev/null || \
	echo 'not installed')." >&2; \
	for each in $(NEWER_PYTHONS); do ! $$each -c '' 2> /dev/null || { \
	echo "There is a newer one here: make PYTHON=$$each $(MAKECMDGOALS)" >&2; exit 1; }; done; \
	echo 'Install one, such as the packages python3.12 and python3.12-venv of Ubuntu.' >&2; \
	echo 'Then name it: make PYTHON=python3.12 $(MAKECMDGOALS)' >&2; exit 1; }
	@echo '== Creating the virtual environment $(VENV) with $(PYTHON)'
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	package=$$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
	echo 'The virtual environment could not be created; the reason is above.' >&2; \
	echo "On Debian and Ubuntu, its package may be missing: sudo apt install $$package" >&2; exit 1; }
