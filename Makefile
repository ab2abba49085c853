# Every target does the set-up it needs; a second call reuses .venv.
#
#   make demo                      serve the bundled model, write a run folder
#   make test                      the quick tests;  PYTEST_ARGS='-m thorough' and
#                                  PYTEST_ARGS='-m slow' pick others
#   make lint                      ruff and ty
#   make docs                      the site, in site/: open site/index.html. Strict, and
#                                  without network once .venv is there
#   make archive                   dist/jaxkv-VERSION.zip, the files of the commit
#   make setup                     only the environment, in .venv
#
# PYTHON=/path/to/python   the interpreter to build .venv from (3.12 or newer)
# EXTRAS=dev,cuda          the extras to install
# JAX='>=0.12,<0.13'       another jax than the one constraints.txt pins
# TYPE_CHECKS=1            check the annotations of arrays at run time; CI does so for
#                          the thorough tests. It costs an eighth of the time
# DEVICELESS=1             with a compiler for GPUs that are not there (0.7 GB), for the
#                          tests of the kernels' programs

PYTHON ?=
EXTRAS ?= dev
JAX ?=
DEVICELESS ?=
DEMO_ARGS ?=
PYTEST_ARGS ?=
TYPE_CHECKS ?=
export PYTHON EXTRAS JAX DEVICELESS
# Compiled modules are kept, also where the variable forbids it: subprocesses of tests
# import them, and the thorough tests those of the quick ones.
export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin
# The packages that compute; commands, reports and figures have no arrays to check.
CHECKED := jaxkv.arrays jaxkv.clock jaxkv.decoding jaxkv.disaggregation jaxkv.engine \
    jaxkv.files jaxkv.ledger jaxkv.memory jaxkv.models jaxkv.parallel jaxkv.progress \
    jaxkv.sampling jaxkv.scheduling jaxkv.server jaxkv.serving jaxkv.simulation \
    jaxkv.speculation jaxkv.text jaxkv.validation jaxkv.verification jaxkv.workloads pallas_kernels \
    scaling.calibration scaling.corpora scaling.costs scaling.curves scaling.fits \
    scaling.forecasts scaling.frontiers scaling.laws scaling.logs scaling.plan \
    scaling.policy scaling.shapes scaling.sweeps scaling.training
comma := ,
space := $(subst ,, )
TYPE_FLAG = $(if $(TYPE_CHECKS),--jaxtyping-packages=$(subst $(space),$(comma),$(strip $(CHECKED)))$(comma)beartype.beartype)

.PHONY: setup demo test lint docs archive

setup:
	@sh .ci/setup

demo: setup
	$(BIN)/jaxkv demo $(DEMO_ARGS)

test: setup
	$(BIN)/python -m pytest -n auto $(TYPE_FLAG) $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check --python .venv

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' jaxkv/__init__.py)

archive:
	mkdir -p dist
	git archive --format=zip --prefix=jaxkv-$(VERSION)/ -o dist/jaxkv-$(VERSION).zip HEAD
