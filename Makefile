# Everything runs in .venv, which `setup` makes and keeps current. ARGS is passed on: make run ARGS="--only 11 -p model_size=small"
PY := .venv/bin/python
# Tests at the same time: up to four, of one thread each. On a GPU one after the other: they would share its memory.
WORKERS = $(shell $(PY) -c 'import os, torch; print(0 if torch.cuda.is_available() else min(4, os.cpu_count()))')

.PHONY: help setup run list test test-bounds solutions planted claims lab learn handout notebooks site html figures release-check clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

setup: ## make or renew .venv (every target below does it by itself)
	@sh lib/setup.sh

run: setup ## run the whole workbook for this machine; resumes; ends with a summary and runs/<machine>/index.html
	@$(PY) -m cs336_systems run $(ARGS)

list: setup ## the notebooks, their parameters and defaults
	@$(PY) -m cs336_systems list

test: setup ## lint, tests, and every notebook against its own outputs
	$(PY) -m ruff check . && $(PY) -m ruff format --check --quiet .
	@$(PY) -m cs336_systems release-check || true
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) --dist loadfile --nbval --nbval-current-env tests notebooks $(ARGS)

test-bounds: ## the tests with the newest versions, part of them with the oldest and mixed ones (for owners)
	@sh lib/bounds.sh $(ARGS)

solutions: setup ## try all right and wrong solutions of the notebooks' steps (for owners)
	CS336_ALL_SOLUTIONS=1 OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) tests/checks/test_solutions.py $(ARGS)

planted: setup ## plant known bugs one at a time in a copy: does a test catch each? (for owners; takes long)
	@$(PY) -m tests.planted $(ARGS)

claims: setup ## perturb the rows: which answers stand all the same? (for owners; takes long)
	@$(PY) -m tests.claims $(ARGS)

lab: setup ## JupyterLab on learn/ if it is there, else on notebooks/
	$(PY) -m jupyter lab --notebook-dir=. --LabApp.default_url=/lab/tree/$(if $(wildcard learn),learn,notebooks) $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS)

learn: setup ## your copies of the notebooks, solutions cleared, in learn/; copies that are there stay
	@$(PY) -m cs336_systems learn $(ARGS)

handout: setup ## the workbook for a class in handout/: no solutions in notebooks or library, no tests
	@$(PY) examples/handout.py $(ARGS)

notebooks: setup ## execute every notebook in place on the CPU, as it is committed
	@$(PY) -m cs336_systems notebooks $(ARGS)

site: setup ## the notebooks as a site in site/, read offline
	@$(PY) -m cs336_systems site $(ARGS)

html: setup ## one executed notebook as a page, folds kept: make html FILE=out.ipynb makes html/00_out.html
	@mkdir -p html && cp "$(FILE)" "html/00_$(notdir $(FILE))" && $(PY) -m cs336_systems site html

figures: setup ## redraw every plot from the rows
	@$(PY) -m cs336_systems figures $(ARGS)

release-check: setup ## the committed rows that are not of today's code, and what has changed since; fails where there are any
	@$(PY) -m cs336_systems release-check

clean: ## remove what runs and tests left behind (not .venv, not figures)
	rm -rf runs .pytest_cache .ruff_cache .hypothesis notebooks/.ipynb_checkpoints
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
