# One environment for everything: `make demo` and `make test` build it when it is missing or when the
# lock file changed. VENV may point elsewhere (.ci/run shares one outside the clone).
VENV   ?= .venv
PYTHON ?= python3.11
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.asyncrl-$(shell cat requirements.lock pyproject.toml Makefile | sha256sum | cut -c1-12)-$(shell pwd | sha256sum | cut -c1-12)

export OMP_NUM_THREADS ?= 1
export CUDA_DEVICE_MAX_CONNECTIONS ?= 1

.PHONY: demo test test-fast test-long quick-fleet quick-trainer quick-ends quick-rest system-fleet system-jobs system-alone lint types install clean

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

# For two cores. What needs no engine runs in three lanes, since it waits as much as it computes; then tests and jobs on
# one shared engine beside jobs that start their own; at last, alone, what must happen within a second.
PYTEST  := $(BIN)/python -m pytest -p no:cacheprovider --durations=8
QUICK   := $(PYTEST) -m "not long and not system"
SYSTEM  := $(PYTEST) -m "system and not long"
PARTS   := quick-rest quick-trainer quick-fleet quick-ends types
ROUTERS := $(addprefix tests/inference/,gpus/test_memory.py routing/test_router.py routing/test_router_client.py routing/test_router_sticky.py engines/test_stopping.py)
FLEET   := $(addprefix --ignore=,$(ROUTERS)) tests/inference
TRAINER := tests/training
ENDS    := tests/weights tests/host tests/exit_protocol tests/test_driver.py tests/test_resume.py $(ROUTERS)
SYSTEM_JOBS  := tests/config/test_argument_lists.py $(addprefix tests/system/test_,bad_input.py exit.py jobs.py replay.py)
SYSTEM_ALONE := tests/system/test_recovery.py

quick-fleet: $(STAMP)
	$(QUICK) $(FLEET)

quick-trainer: $(STAMP)
	$(QUICK) $(TRAINER)

quick-ends: $(STAMP)
	$(QUICK) $(ENDS)

quick-rest: $(STAMP)
	$(QUICK) $(addprefix --ignore=,tests/inference $(TRAINER) $(ENDS)) tests

system-fleet: $(STAMP)
	$(SYSTEM) $(addprefix --ignore=,$(SYSTEM_JOBS) $(SYSTEM_ALONE)) tests/system

system-jobs: $(STAMP)
	$(SYSTEM) $(SYSTEM_JOBS)

system-alone: $(STAMP)
	$(SYSTEM) $(SYSTEM_ALONE)

test-fast: lint
	$(MAKE) --no-print-directory --jobs 3 --output-sync=target $(PARTS)

test: test-fast
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target system-fleet system-jobs
	$(MAKE) --no-print-directory system-alone

test-long: $(STAMP)
	$(BIN)/python -m pytest -m long --timeout 7200

clean:
	rm -rf build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
