# Each target sets up what it needs in .venv; nothing else has to be installed but Python >= 3.11.
PYTHON ?= python3
ENVIRONMENT := .venv
BIN := $(ENVIRONMENT)/bin
STAMP := $(ENVIRONMENT)/.installed
# uv, where there is one, takes 19 s in place of 203 (LOG.md). Python compiles what is imported when it is:
# pip would compile all of it, for as long as it takes to install.
ifneq ($(shell command -v uv 2>/dev/null),)
VENV := uv venv --quiet --seed --allow-existing --python $(PYTHON)
INSTALL := uv pip install --quiet --python $(BIN)/python
UPGRADE := --upgrade
else
VENV := $(PYTHON) -m venv
INSTALL := $(BIN)/pip install --quiet --no-compile --disable-pip-version-check
UPGRADE := --upgrade --upgrade-strategy eager
endif
# A process that compiles all that it imports takes 5 s of CPU more to start: some machines forbid Python to keep it.
unexport PYTHONDONTWRITEBYTECODE
# Files are spread over processes: most of the time of most tests is compiling, on one core.
WORKERS := -n auto --maxprocesses 4 --dist loadfile
# The extra with the JAX of the chips that are here.
CHIPS := $(if $(wildcard /dev/nvidia0),[gpu],$(if $(wildcard /dev/accel* /dev/vfio/[0-9]*),[tpu]))

TESTS := # all, or paths
# The newest Python that every package of [dev] has wheels for. A name may be a shim of pyenv for none.
NEWEST = $(shell for python in python3.13 python3.12 \
	$$(ls -d "$$HOME"/.pyenv/versions/3.1[23].*/bin/python 2>/dev/null | sort -rV); do \
	"$$python" -c 'import sys; print(sys.executable)' 2>/dev/null && break; done)

.PHONY: quickstart prove check test test-all test-faults test-newest newest test-tpu-compiler \
	lint docs clean

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "jaxrl needs Python 3.11 or newer, this is " + sys.version; sys.exit(0)'
	$(VENV) $(ENVIRONMENT)
	$(INSTALL) --editable .
	touch $@

$(STAMP)-dev: $(STAMP)
	$(INSTALL) --editable '.[dev]'
	touch $@

$(STAMP)-docs: $(STAMP)
	$(INSTALL) --editable '.[docs]'
	touch $@

quickstart: $(STAMP)  ## train a small model from random weights, about 3 minutes on two cores (LOG.md)
	$(BIN)/python -m jaxrl.train --config=configs/quickstart.py

prove: $(STAMP)  ## does jaxrl work on this machine, and how fast? one page (docs/prove.md)
	$(if $(CHIPS),$(INSTALL) --editable '.$(CHIPS)')
	$(BIN)/python -m jaxrl.prove --quick

check: $(STAMP)-dev  ## what fails most often, in under two minutes: before every commit
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/python -m pytest $(WORKERS) -m 'check and not slow' \
		$$(grep -rl 'pytestmark = pytest.mark.check' tests --include='test_*.py')

test: $(STAMP)-dev  ## everything that is not marked slow
	$(BIN)/python -m pytest $(WORKERS) $(TESTS)

test-newest:  ## the same with the newest Python, and the newest of all that the bounds in pyproject.toml allow
	@if [ -z "$(NEWEST)" ]; then echo "skipped: no Python >= 3.12 here"; else \
		$(MAKE) ENVIRONMENT=.venv-newest PYTHON="$(NEWEST)" newest test; fi

newest: $(STAMP)-dev
	$(INSTALL) $(UPGRADE) --editable '.[dev]'

# In a folder of its own: where libtpu is installed, JAX looks for chips in every other program, too.
test-tpu-compiler: $(STAMP)-dev  ## what the TPU compiler makes of the programs; needs no chip, but 0.2 GB of libtpu
	$(INSTALL) --no-deps --upgrade --target $(ENVIRONMENT)/libtpu "$$($(BIN)/python -c 'import importlib.metadata as m; \
	print(next(x for x in m.requires("jax") if x.startswith("libtpu")).split(";")[0])')"
	PYTHONPATH=$(ENVIRONMENT)/libtpu $(BIN)/python -m pytest $(if $(ALL),-m '',-k tpu) \
		$(or $(TESTS),$$(grep -rl 'importorskip("libtpu")' tests))

test-all: $(STAMP)-dev $(STAMP)-docs  ## slow tests too
	$(BIN)/python -m pytest $(WORKERS) -m '' $(TESTS)

# By hand, and before a release; SEED draws others.
test-faults: $(STAMP)-dev  ## plant faults of one line in what is trained, say which no test notices
	$(BIN)/python -m tests.faults --known --count=40 --seed=$(or $(SEED),0) \
		--rooms losses advantages training/objective.py data/packing.py \
		--tests tests/losses tests/advantages tests/data/test_packing.py tests/test_golden.py \
		tests/test_invariance.py tests/training/test_objective.py tests/training/test_update.py \
		tests/config/test_equal_values.py tests/rollout/test_sampling.py tests/rollout/test_reward_terms.py

lint: $(STAMP)-dev  ## what pre-commit and CI check
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pre-commit run --all-files

docs: $(STAMP)-docs  ## the site in build/site, which opens from the file system; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf .venv .venv-newest runs build/site
