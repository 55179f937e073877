# One environment for everything: `make demo` and `make test` build it when it is missing or when the
# lock file changed. VENV may point elsewhere (.ci/run shares one outside the clone).
VENV   ?= .venv
PYTHON ?= python3.11
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.asyncrl-$(shell cat requirements.lock pyproject.toml Makefile | sha256sum | cut -c1-12)-$(shell pwd | sha256sum | cut -c1-12)

export OMP_NUM_THREADS ?= 1
export CUDA_DEVICE_MAX_CONNECTIONS ?= 1

.PHONY: demo test test-fast test-long quick-half quick-rest lint types install clean

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

# What needs no engine runs in two halves side by side; then whole jobs and real engines, one after the other.
HALF  := tests/host tests/inference tests/training/megatron tests/weights
QUICK := $(BIN)/python -m pytest -m "not long and not system" -p no:cacheprovider

quick-half: $(STAMP)
	$(QUICK) $(HALF)

quick-rest: $(STAMP)
	$(QUICK) $(addprefix --ignore=,$(HALF)) tests

test-fast: lint types
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target quick-half quick-rest

test: test-fast
	$(BIN)/python -m pytest -m "system and not long"

test-long: $(STAMP)
	$(BIN)/python -m pytest -m long --timeout 7200 -o faulthandler_timeout=7300

clean:
	rm -rf build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
