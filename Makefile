# Everything runs in .venv, installed once from the pinned versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-extended test-newest quality style bench cards clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,lab]"
	touch $@

demo: .venv/installed
	OMP_NUM_THREADS= $(BIN)/diffusers-ext demo

# A process per core; the tests of a file share what they set up.
test: .venv/installed
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile

# What an upgrade would break: the newest releases, in an environment of their own.
test-newest:
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[dev,lab]"
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade \
		diffusers transformers peft accelerate huggingface_hub safetensors
	.venv-newest/bin/python -m pip list | grep -iE "^(torch|diffusers|transformers|peft|accelerate|huggingface[-_]hub) "
	.venv-newest/bin/python -m pytest --numprocesses auto --dist loadfile

# What `make test` leaves out: everything that is published, loaded by a process that lacks this package, and more.
test-extended: .venv/installed
	$(BIN)/python -m pytest -m extended --numprocesses auto --dist loadfile

quality: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/check_repo.py
	$(BIN)/python scripts/render_cards.py --check

style: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

cards: .venv/installed
	$(BIN)/python scripts/render_cards.py

bench: .venv/installed
	OMP_NUM_THREADS= $(BIN)/python benchmarks/run.py

clean:
	rm -rf .venv .venv-newest outputs build dist
