# One environment for everything: `make demo` and `make test` build it when it is missing or when the
# lock file changed. VENV may point elsewhere (.ci/run shares one outside the clone).
VENV   ?= .venv
PYTHON ?= python3.11
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.asyncrl-$(shell cat requirements.lock pyproject.toml Makefile | sha256sum | cut -c1-12)-$(shell pwd | sha256sum | cut -c1-12)

install: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing asyncrl and its pinned dependencies into $(VENV) (about 11 GB and 5 minutes the first time)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.asyncrl-*
	@touch $@

demo: $(STAMP)
	$(BIN)/torchrun --nproc-per-node 1 entrypoints/train.py @ entrypoints/recipes/demo.toml

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# For two cores. A lane is one pytest, which waits most of its time; so many run at once that both cores stay busy. The
# longest come first: a lane that is done makes room for the next one. At most five engines live at once (2.4 GiB each).
# What no other lane names is in quick-rest, or in system-fleet where it lies in tests/system. At last, alone, comes what
# must happen within a second.
JOBS    ?= 6
PYTEST  := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -p no:cacheprovider --durations=8
QUICK   := quick-updates quick-training quick-ends quick-engines quick-rollout quick-rest
FIRST   := system-fleet system-exit
LAST    := system-jobs system-gang types

.PHONY: demo test test-fast test-long lint install clean $(FIRST) $(QUICK) $(LAST) system-recovery

updates   := tests/inference/updates
training  := tests/training
ends      := tests/host tests/exit_protocol tests/test_driver.py tests/test_resume.py
engines   := --ignore=$(updates) tests/inference
rollout   := tests/rollout tests/weights
rest      := $(addprefix --ignore=,tests/inference tests/system $(training) $(ends) $(rollout)) tests
exit      := tests/system/test_exit.py
jobs      := tests/config/test_argument_lists.py $(addprefix tests/system/test_,jobs.py bad_input.py replay.py)
gang      := tests/system/test_gang.py
recovery  := tests/system/test_recovery.py
fleet     := $(addprefix --ignore=,$(exit) $(jobs) $(gang) $(recovery)) tests/system

$(QUICK): quick-%: $(STAMP)
	$(PYTEST) -m "not long and not system" $($*)

$(filter system-%,$(FIRST) $(LAST)) system-recovery: system-%: $(STAMP)
	$(PYTEST) -m "system and not long" $($*)

test-fast: lint
	$(MAKE) --no-print-directory --jobs $(JOBS) --output-sync=target $(QUICK) types

test: lint
	$(MAKE) --no-print-directory --jobs $(JOBS) --output-sync=target $(FIRST) $(QUICK) $(LAST)
	$(MAKE) --no-print-directory system-recovery

test-long: $(STAMP)
	KEEP_RESULTS=1 $(PYTEST) -m long --timeout 7200

clean:
	rm -rf build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
