# One environment for everything: `make demo` and `make test` build it when it is missing or when the
# lock file changed. VENV may point elsewhere (.ci/run shares one outside the clone).
VENV   ?= .venv
PYTHON ?= python3.11
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.asyncrl-$(shell cat requirements.lock pyproject.toml Makefile | sha256sum | cut -c1-12)-$(shell pwd | sha256sum | cut -c1-12)

export OMP_NUM_THREADS ?= 1
export CUDA_DEVICE_MAX_CONNECTIONS ?= 1

.PHONY: demo test test-fast test-long quick-ranks quick-rest lint types install clean

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

# For the impatient: what needs no engine, in two halves side by side.
RANKS := tests/host tests/training tests/weights
QUICK := $(BIN)/python -m pytest -m "not long and not system" -p no:cacheprovider

quick-ranks: $(STAMP)
	$(QUICK) $(RANKS)

quick-rest: $(STAMP)
	$(QUICK) $(addprefix --ignore=,$(RANKS)) tests

test-fast: lint types
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target quick-ranks quick-rest

test: lint types
	$(BIN)/python -m pytest -m "not long"

test-long: $(STAMP)
	$(BIN)/python -m pytest -m long --timeout 7200

clean:
	rm -rf build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
