# Every target sets up what it needs, on a machine with Python 3.11+ and nothing else; the second time it starts at once.
#   make demo       a small model, from nothing to a policy trained by SFT and GRPO, in minutes on a CPU
#   make install    plaudit alone, in .venv           make dev     with all extras and the development tools
#   make test       the core suite                    make lint    ruff and pyright
#   make test-all   core, lint, docs, the slow tier   make lock    pin the newest versions that work
#   make docs       the documentation as a site       make docs-serve   the same, shown while you write
# For another torch build: make install TORCH="torch==2.13.0 --index-url URL"  (README, "Install").

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TORCH ?= torch==2.13.0
BIN := .venv/bin

# Containers often set this. Then nothing would be cached, and every process would compile torch and transformers again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: install dev demo docs docs-serve test test-all lint format lock clean
install: .venv/installed
dev: .venv/dev-installed

# Modules are compiled when they are first imported: compiling all of them here would take minutes, and most are never imported.
# pip shows its progress: the packages are large, and a silent minute looks like a hang.
PIP := $(BIN)/pip install --no-compile --disable-pip-version-check
.venv/installed: pyproject.toml requirements.lock
	@test -n "$(PYTHON)" || { echo "plaudit needs Python 3.11 or newer"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) $(TORCH)
	$(PIP) --constraint requirements.lock --editable .
	@touch $@

.venv/dev-installed: .venv/installed
	$(PIP) --constraint requirements.lock --editable '.[dev]'
	@touch $@

.venv/docs-installed: .venv/installed
	$(PIP) --constraint requirements.lock --editable '.[docs]'
	@touch $@

demo: .venv/installed
	$(BIN)/plaudit demo $(ARGS)

# The TRL baseline has its own environment: its pins must not become ours.
.venv-trl/installed: bench/requirements-trl.txt
	nice $(PYTHON) -m venv .venv-trl
	nice .venv-trl/bin/pip install --quiet --no-compile $(TORCH)
	nice .venv-trl/bin/pip install --quiet --no-compile --requirement bench/requirements-trl.txt
	@touch $@

# So has vLLM. Its image and sound packages are not needed and must fit the torch build, or importing vllm fails.
.venv-vllm/installed: bench/requirements-vllm.txt
	nice $(PYTHON) -m venv .venv-vllm
	nice .venv-vllm/bin/pip install --quiet --no-compile $(TORCH)
	nice .venv-vllm/bin/pip install --quiet --no-compile --requirement bench/requirements-vllm.txt
	nice .venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# And verl, of which only the reward loop is used: without its dependencies, which are for GPUs.
.venv-verl/installed: bench/requirements-verl.txt
	nice $(PYTHON) -m venv .venv-verl
	nice .venv-verl/bin/pip install --quiet --no-compile $(TORCH)
	nice .venv-verl/bin/pip install --quiet --no-compile --requirement bench/requirements-verl.txt
	nice .venv-verl/bin/pip install --quiet --no-compile --no-deps verl==0.9.1
	@touch $@

# RewardBench's own scoring code, as a folder that .venv's Python searches: its dependencies are for running models, and old.
.venv-rewardbench/installed: .venv/dev-installed
	nice $(BIN)/pip install --quiet --no-compile --no-deps --target .venv-rewardbench rewardbench==0.1.4
	@touch $@

# What needs no torch comes first, so that testing starts at once: importing torch and transformers takes five seconds.
# Then neighbouring files for each worker (worksteal), so that most of what the tests of a file share is made once. One worker
# more than there are cores, since tests also wait: for servers, for processes. At most 8, of about a gigabyte each.
QUICK := tests/test_rooms.py
WORKERS ?= $(shell $(PYTHON) -c 'import os; \
	print(max(2, min(8, 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2))))')
test: .venv/dev-installed
	$(if $(ARGS),,$(BIN)/pytest $(QUICK))
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m "not slow" $(if $(ARGS),,$(addprefix --ignore=,$(QUICK))) $(ARGS)

# While the core suite runs, the environments of the slow tests are installed one after another with what it leaves of the cores
# (not the packages of docs: they go where the tests run). The slow tests of a file (vLLM's) run one after another,
# the files in the order of tests/conftest.py. Two at a time: three were no faster on two cores, and took up to 14 GB.
SLOW_WORKERS ?= 2
SIDE_ENVIRONMENTS := .venv-vllm/installed .venv-trl/installed .venv-verl/installed .venv-rewardbench/installed
test-all: .venv/dev-installed
	$(MAKE) -j 2 test $(SIDE_ENVIRONMENTS)
	$(MAKE) .venv/docs-installed
	$(MAKE) -j 2 lint docs
	$(BIN)/pytest -n $(SLOW_WORKERS) --dist loadfile --no-loadscope-reorder -m slow $(ARGS)

lint: .venv/dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# The reference is generated from the code. A link that leads nowhere, or a page that no menu names, is an error (with --quiet it
# would not be: mkdocs then counts no warnings).
docs: .venv/docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)
	@echo "site/index.html opens in a browser; \`make docs-serve\` adds search and shows changes at once"

docs-serve: .venv/docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --watch plaudit --watch recipes $(ARGS)

format: .venv/dev-installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Constraints, not requirements: torch's own CUDA packages, which differ by build, stay torch's business.
lock:
	rm -rf .venv && $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(TORCH) && $(BIN)/pip install --quiet --editable '.[dev,docs]'
	$(BIN)/pip freeze --exclude-editable --exclude plaudit | grep -v -e '^nvidia-' -e '^triton' -e '^cuda-' | sed -e 's/+[a-z0-9.]*$$//' > requirements.lock
	@touch .venv/installed .venv/dev-installed .venv/docs-installed

clean:
	rm -rf .venv .venv-* site
