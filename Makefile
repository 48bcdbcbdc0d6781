# Each target sets up what it lacks in .venv. TORCH_INDEX=URL takes torch from another package index,
# such as one with the smaller CPU builds.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.installed

.PHONY: demo test check interop gpu-check clean
.DEFAULT_GOAL := test

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(VENV)/bin/python -m pip install --quiet --no-deps --constraint constraints.txt --index-url $(TORCH_INDEX) torch)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

# Through the environment, unexpanded, so that neither make nor a shell reads a prompt's quotes or dollar signs.
override PROMPT := $(value PROMPT)
export PROMPT ONESHOT PORT DTYPE SEED TEMPERATURE MAX_TOKENS DRAFTER K MODEL DRAFT_MODEL
demo: $(READY)
	@$(VENV)/bin/paceline demo

test: $(READY)
	$(VENV)/bin/pytest -q

check: $(READY)
	bash scripts/check.sh

interop: $(READY)
	bash scripts/interop.sh

# On a machine with a GPU `device: auto` takes it, so these tests then run there.
gpu-check: $(READY)
	@$(VENV)/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "no GPU found")'
	$(VENV)/bin/pytest -q tests/unit/engine_torch tests/system

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
