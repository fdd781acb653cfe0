# make demo   learn real domains end to end
# make test   every check: lint, types, tests (under 12 minutes on 2 cores)
# make docs   the documentation site, into site/
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: install demo test test-all lint docs docs-serve pages clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: install
	$(BIN)/polymask demo

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

test-all: lint
	$(BIN)/python -m pytest -n auto --dist worksteal

# Strict: a warning is an error, and so is a dead link or a page that loads anything from elsewhere.
docs: install
	$(BIN)/python -m pytest -q -m "not slow" tests/test_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python tools/check_site.py

docs-serve: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# What in docs/ is made from the code and from results/; the tests fail where it is stale.
pages: install
	for tool in method_pages params_table cost_table speed_table scale_page serve_tables cli_pages; do \
	    $(BIN)/python tools/$$tool.py || exit 1; done

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist site
