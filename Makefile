# Every command of the house. Needs Python 3.11 or newer, git and make; everything else goes into .venv.

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --no-input --disable-pip-version-check --constraint requirements.lock
RUN ?= runs/demo
OLDEST_TORCH = $(shell sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)
DEMO := --data digits --batch-size 32 --micro-batch 8 --epochs 20 --lr 0.02 --momentum 0.9 --label-smoothing 0.1 --seed 0 --out $(RUN)

# $(call or_say,what to do next): ends a command whose failure should say so in one line.
or_say = || { echo "make $@: failed; $(1)" >&2; exit 1; }

.DEFAULT_GOAL := help
.NOTPARALLEL:
.SECONDARY:
.PHONY: help env demo test test-slow test-device soak mutants test-oldest check format weight bench gpu docs wheel clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.* ## /  make \1	/p' Makefile | expand -t 20

env: .venv/.with-digits .venv/.with-plot .venv/.with-dev .venv/.with-transformers .venv/.with-accelerate .venv/.with-lightning ## make .venv with everything needed to work on anybatch
	@echo "env: ready in .venv"

demo: .venv/.with-digits ## train LeNet-5 on real handwritten digits and say where the files are
	@echo "demo: training LeNet-5 on handwritten digits, 32 rows an update, 8 at a time"
	@$(BIN)/anybatch train lenet5 $(DEMO) $(call or_say,see the message above; for a fresh environment: make clean)

test: env ## run the tests, without those marked slow
	@echo "test: running all tests but the slow ones"
	@PYTHONHASHSEED=0 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow" $(call or_say,repeat one with: $(BIN)/python -m pytest -k NAME)

test-slow: env ## run the tests marked slow
	@echo "test-slow: running the slow tests"
	@PYTHONHASHSEED=0 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow $(call or_say,repeat one with: $(BIN)/python -m pytest -k NAME)

test-device: env ## run tests on DEVICE=sim, the simulated accelerator, which takes a C++ compiler; or on yours, DEVICE=cuda
	@echo "test-device: running tests on $(or $(DEVICE),sim)"
	@PYTHONHASHSEED=0 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow" --device $(or $(DEVICE),sim) @tests/on_device.txt \
	    $(call or_say,repeat one with: $(BIN)/python -m pytest --device $(or $(DEVICE),sim) -k NAME)

soak: env .venv/.with-server ## the laws on cases drawn at random, for MINUTES=10 or ROUNDS, from SEED=0; trainings killed at any moment
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak $(if $(ROUNDS),--rounds $(ROUNDS),--minutes $(or $(MINUTES),10)) --seed $(or $(SEED),0) \
	    $(call or_say,the case is above; repeat it with: make soak SEED=... ROUNDS=...)

mutants: env ## change COUNT=200 places of src drawn by SEED=53, one at a time, and ask whether a test notices; a stopped run goes on
	@echo "mutants: running tests on changed copies of src; the first time also the suite, to see which test runs which line"
	@$(BIN)/python -m tests.mutants --seed $(or $(SEED),53) --count $(or $(COUNT),200) $(if $(RESULTS),--results $(RESULTS)) \
	    $(call or_say,see the message above; repeat it: what is done stays in build/mutants)

test-oldest: .venv-oldest/.ready ## run the tests, without those marked slow, with the oldest torch that is supported
	@echo "test-oldest: running all tests but the slow ones"
	@PYTHONHASHSEED=0 OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -n 2 -m "not slow" $(call or_say,repeat one with: .venv-oldest/bin/python -m pytest -k NAME)

check: env ## check format, lint, types and the weight of src
	@echo "check: format, lint, types, weight"
	@$(BIN)/ruff format --quiet --check --diff . $(call or_say,run: make format)
	@$(BIN)/ruff check --quiet . $(call or_say,run: make format; then fix what it still names)
	@$(BIN)/pyright $(call or_say,fix the types named above)
	@$(BIN)/python -m tests.weight --check > /dev/null $(call or_say,see the message above and the table of: make weight)

format: env ## format the code and fix what lint can fix by itself
	@echo "format: rewriting in place"
	@$(BIN)/ruff check --quiet --fix . $(call or_say,fix by hand what is named above)
	@$(BIN)/ruff format --quiet . $(call or_say,fix the syntax named above)

weight: env ## print the syntax nodes of each package; src may not get heavier than tests/weight.json, which this lowers
	@$(BIN)/python -m tests.weight $(call or_say,see the message above)

bench: env .venv/.with-bench ## compare speed and memory with hand-written PyTorch, accelerate and Fabric, and write README's table; ONLY="mlp gpt" for some
	@echo "bench: measuring, about nine minutes; leave the machine alone meanwhile"
	@MALLOC_TOP_PAD_=67108864 OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks $(if $(ONLY),--only $(ONLY),--page) $(call or_say,a ratio is over its limit or a run broke: see above; repeat on an idle machine)

gpu: env ## measure every promise on this machine's accelerator within MINUTES=9, and write a page
	@PYTHONPATH=src $(BIN)/python -m benchmarks.gpu --minutes $(or $(MINUTES),9) $(call or_say,a section is broken or there is no device: see above)

# The homes are imported for their docstrings, so the site needs the libraries that they are for.
docs: env .venv/.with-docs ## build the documentation site in build/docs; a warning is an error
	@echo "docs: building the site"
	@rm -rf docs/reference
	@$(BIN)/python -m sphinx -b html -W --keep-going -n -q docs build/docs $(call or_say,mend what is named above)
	@echo "docs: open build/docs/index.html"

# The wheel sees the packages of .venv, but not the checkout: what it forgets to hold is missed.
wheel: env ## build the wheel, install it in an environment of its own, train with it and draw its page
	@echo "wheel: building, installing, training"
	@rm -rf build/wheel && $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel . $(call or_say,see the message above)
	@$(BIN)/python -m venv --clear build/wheel/env
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(build/wheel/env/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages.pth"
	@build/wheel/env/bin/python -m pip install --quiet --no-input --disable-pip-version-check --no-deps --no-index --force-reinstall build/wheel/*.whl $(call or_say,see the message above)
	@cd build/wheel && env/bin/anybatch train lenet5 --data digits --epochs 1 --quiet --out run && env/bin/anybatch report run $(call or_say,the wheel lacks something: see above)

clean: ## delete .venv, caches and build outputs; runs/ stays
	@echo "clean: deleting .venv, caches and build outputs"
	@rm -rf .venv .venv-oldest .pytest_cache .ruff_cache .hypothesis build dist docs/reference
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The pinned torch goes first and alone: nothing that comes later can then draw in another one.
.venv/.torch: requirements.lock
	@for python in $(or $(PYTHON),python3.11 python3) ""; do \
	    $$python -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; \
	done; \
	test -n "$$python" $(call or_say,install Python 3.11 or newer with its venv module or name one: make PYTHON=/path/to/python3); \
	echo "env: making .venv with $$($$python --version)"; \
	$$python -m venv .venv $(call or_say,run: make clean)
	@echo "env: installing torch (large: minutes on a slow line)"
	@$(PIP) torch $(call or_say,look at the line above and at your network then repeat; afresh with: make clean)
	@touch $@

.venv/.with-%: pyproject.toml .venv/.torch
	@echo "env: installing anybatch [$*]"
	@$(PIP) --editable '.[$*]' $(call or_say,look at the line above and at your network then repeat; afresh with: make clean)
	@touch $@

# The oldest torch of pyproject.toml, with what pip finds to go with it: requirements.lock pins another torch.
.venv-oldest/.ready: pyproject.toml .venv/.torch
	@echo "test-oldest: making .venv-oldest (large: minutes on a slow line)"
	@$(BIN)/python -m venv --clear .venv-oldest
	@.venv-oldest/bin/python -m pip install --quiet --quiet --no-input --disable-pip-version-check \
	    'torch==$(OLDEST_TORCH).*' --editable '.[digits,plot,dev,transformers,accelerate,lightning]' \
	    $(call or_say,look at the line above and at your network then repeat; afresh with: make clean)
	@touch $@
