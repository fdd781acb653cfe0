# make demo   learn real domains end to end
# make test   every check: lint, types, tests (under 12 minutes on 2 cores)
# make test-cpus   the tests as three other machines would round
# make docs   the documentation site, into site/
#
# On Linux without a GPU, `make demo CPU=1` (and `make test CPU=1`, `make install CPU=1`) takes torch and torchvision from
# PyTorch's own CPU index, without the gigabytes of CUDA that PyPI's torch brings.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TORCH  := torch torchvision $(if $(CPU),--extra-index-url https://download.pytorch.org/whl/cpu)
QUICK  := $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

.PHONY: install demo test test-all test-cpus lint docs docs-serve pages clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: install
	$(BIN)/polymask demo

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(QUICK)

test-all: lint
	$(BIN)/python -m pytest -n auto --dist worksteal

# A training ends differently on another CPU, so no test may hang on how this one rounds: the quick suite with the
# instructions of an old CPU, with those of most, and with one thread.
test-cpus: install
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 $(QUICK)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(QUICK)
	OMP_NUM_THREADS=1 $(QUICK)

# Strict: a warning is an error, and so is a dead link or a page that loads anything from elsewhere.
docs: install
	$(BIN)/python -m pytest -q -m "not slow" tests/test_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python tools/check_site.py

docs-serve: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# What in docs/ is made from the code and from results/; the tests fail where it is stale.
pages: install
	for tool in method_pages params_table cost_table speed_table scale_page serve_tables benchmark_tables findings_page cli_pages rooms_page; do \
	    $(BIN)/python tools/$$tool.py || exit 1; done

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist site
