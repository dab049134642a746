# Everything runs in .venv, which `setup` makes and keeps current. ARGS is passed on: make run ARGS="--only 11 -p model_size=small"
PY := .venv/bin/python

.PHONY: help setup run list test lab notebooks figures bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup: ## make or renew .venv (every target below does it by itself)
	@sh lib/setup.sh

run: setup ## run the whole workbook for this machine; resumes; ends with a summary and runs/<machine>/index.html
	@$(PY) -m cs336_systems run $(ARGS)

list: setup ## the notebooks, their parameters and defaults
	@$(PY) -m cs336_systems list

test: setup ## lint, tests, and every notebook against its own outputs
	$(PY) -m ruff check .
	$(PY) -m pytest $(ARGS)
	@# Against the outputs, not the reader's own rows: what the notebooks measure here goes to a scratch folder.
	scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && \
	CS336_FIGURES="$$scratch" $(PY) -m pytest --nbval --nbval-current-env notebooks/

lab: setup ## JupyterLab on the notebooks
	$(PY) -m jupyter lab --notebook-dir=notebooks $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS)

notebooks: setup ## execute every notebook in place on the CPU, as it is committed
	@$(PY) -m cs336_systems notebooks $(ARGS)

figures: setup ## redraw every plot from the rows
	@$(PY) -m cs336_systems figures $(ARGS)

bench: setup ## the attention kernels against PyTorch's own; rows are saved (a GPU for times worth reading)
	@$(PY) -m cs336_systems bench $(ARGS)

clean: ## remove what runs and tests left behind (not .venv, not figures)
	rm -rf runs .pytest_cache .ruff_cache .hypothesis notebooks/.ipynb_checkpoints
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
