# Every target does the set-up it needs; a second call reuses .venv.
#
#   make demo                      serve the bundled model, write a run folder
#   make test                      the quick tests;  PYTEST_ARGS='-m thorough' and
#                                  PYTEST_ARGS='-m slow' pick others
#   make lint                      ruff and ty
#   make docs                      the site, in site/: open site/index.html. Strict, and
#                                  without network once .venv is there
#   make setup                     only the environment, in .venv
#
# PYTHON=/path/to/python   the interpreter to build .venv from (3.12 or newer)
# EXTRAS=dev,cuda          the extras to install
# JAX='>=0.12,<0.13'       another jax than the one constraints.txt pins
# DEVICELESS=1             with a compiler for GPUs that are not there (0.7 GB), for the
#                          tests of the kernels' programs

PYTHON ?=
EXTRAS ?= dev
JAX ?=
DEVICELESS ?=
DEMO_ARGS ?=
PYTEST_ARGS ?=
export PYTHON EXTRAS JAX DEVICELESS
# Compiled modules are kept, also where the variable forbids it: subprocesses of tests
# import them, and the thorough tests those of the quick ones.
export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin

.PHONY: setup demo test lint docs

setup:
	@sh .ci/setup

demo: setup
	$(BIN)/jaxkv demo $(DEMO_ARGS)

test: setup
	$(BIN)/python -m pytest -n auto $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check --python .venv

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
