# Two commands for a newcomer: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-long lint bench gpu-check clean install

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: install
	$(BIN)/python run.py -m comm=zero3,zeropp hydra.sweep.dir=outputs/demo
	$(BIN)/twinbed-report outputs/demo

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p .lint && ln -sfn .. .lint/twinbed
	cd .lint && ../$(BIN)/mypy --config-file ../pyproject.toml -p twinbed
	cd .lint && ../$(BIN)/lint-imports --config ../pyproject.toml

test: lint
	$(BIN)/python tests/run_all.py

test-long: install
	$(BIN)/python -m pytest -m long

bench: install
	$(BIN)/python benchmarks/bench.py

gpu-check: install
	$(BIN)/python benchmarks/gpu_check.py

clean:
	rm -rf $(VENV) .lint build dist *.egg-info outputs multirun .pytest_cache .mypy_cache .ruff_cache .hypothesis
