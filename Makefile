# Everything is installed into .venv of this folder; Python 3.12, git and make are all it needs.
# setup | demo | test | lint: each installs first what is missing, and needs no network afterwards.

BASE_PYTHON ?= python3.12
TEST_PROCESSES ?= 2
VENV := .venv
PYTHON := $(VENV)/bin/python
# Written last and holds this folder's path: without it the environment is incomplete.
STAMP := $(VENV)/.installed
PIP_INSTALL := $(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt
INSTALL := $(PIP_INSTALL) --no-build-isolation -e '.[demo,test]'

# Another interpreter's settings would leak into the environment.
unexport PYTHONHOME PYTHONPATH
# pyright would ask a registry for newer releases.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

# A moved folder or a removed interpreter leaves an environment that only looks complete.
$(shell test "$$(cat $(STAMP) 2>&1)" = "$(CURDIR)" && $(PYTHON) -I -c pass || rm -f $(STAMP))

.PHONY: setup demo test lint

setup: $(STAMP)

demo: $(STAMP)
	$(PYTHON) examples/tiny_rl/run.py $(DEMO_FLAGS)

# Two processes take files of tests in turn: one of them would leave the second core idle.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest tests -n $(TEST_PROCESSES) --dist loadfile \
		--no-loadscope-reorder --durations=15

lint: $(STAMP)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m pyright

# An update that cannot succeed (no network) fails before the stamp goes; one that is interrupted
# later is redone from nothing. pycosat, which reasoning-gym needs, has no wheel: where there is no
# C compiler, one that comes as a wheel builds it.
$(STAMP): setup.py constraints.txt
	@if test -e $@; then $(INSTALL) --dry-run && rm $@; else \
		$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' || { \
			echo "Python 3.12 is needed, but $(BASE_PYTHON) is not it or does not run; install it" \
				"or name it: make BASE_PYTHON=/path/to/python3.12" >&2; exit 1; }; \
		echo "Installing into $(CURDIR)/$(VENV): about 3 minutes and 5.5 GB"; \
		$(BASE_PYTHON) -m venv --clear $(VENV) && $(PIP_INSTALL) setuptools; fi
	@if command -v cc >/dev/null || command -v gcc >/dev/null; then $(INSTALL); else \
		$(PIP_INSTALL) ziglang && CC="'$(CURDIR)/$(PYTHON)' -m ziglang cc" $(INSTALL); fi
	@echo "$(CURDIR)" >$@
