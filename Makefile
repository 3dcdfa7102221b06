# The ten verbs of a contributor; each is one command that can be run by hand as well.
PYTHON := $(or $(SAM_VENV),.venv)/bin/python
DEV := .venv-dev

.DEFAULT_GOAL := help
.PHONY: help setup patch check fast test full bench soak wheel clean

help: ## say what there is
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

setup: ## make .venv with SGLang for the CPU and what the tests need
	scripts/setup_env.sh --tests

patch: setup ## apply the patches to .venv and prove them
	scripts/apply_patches.sh apply && scripts/apply_patches.sh check

check: $(DEV)/ready ## lint, types, spelling, patch rules (pre-commit); the documents build
	$(DEV)/bin/pre-commit run --all-files
	scripts/docs.sh

fast: ## tests without a server: a minute or two
	scripts/test.sh --fast

test: ## all tests but the slow server configurations
	scripts/test.sh

full: ## what CI runs
	.ci/run

bench: patch ## stock against sam on one swarm, side by side
	scripts/quickstart.sh

soak: ## half an hour of random hints at full load
	scripts/soak.sh

wheel: ## dist/: an installable wheel with the patches inside
	$(PYTHON) -m pip wheel --no-deps --wheel-dir dist .

clean: ## remove what was built; .venv and the model cache stay
	rm -rf build dist agent_sam.egg-info .ruff_cache .mypy_cache .pytest_cache

$(DEV)/ready: pyproject.toml
	python3 -m venv $(DEV)
	$(DEV)/bin/python -m pip install --quiet "pre-commit>=4"
	touch $@
