# Everything lives in .venv, and SGLang in .venv-sglang. `make demo` and `make test` set up what they need themselves.
PY := .venv/bin/python
BIN := .venv/bin
PYTEST_ARGS ?=
# Of test-sglang: an interpreter with the release of SGLang that the capture plugin is tested with.
SGLANG_PYTHON ?= .venv-sglang/bin/python
# Of bench-strategies and bench-serving: a conversation file (default: the one that ships with specfleet), and further flags.
DATA ?=
BENCH_ARGS ?=

.PHONY: help setup sglang demo test test-sglang lint proto bench bench-strategies bench-serving clean
help:
	@echo "make demo    train a real draft for a real target on this machine and prove it in decoding (about 10 minutes)"
	@echo "make test    unit, integration and chaos tests against real services"
	@echo "make sglang  only set up .venv-sglang: a real SGLang server for a machine without a GPU"
	@echo "make test-sglang SGLANG_PYTHON=PATH"
	@echo "             the tests of capture with the SGLang of that interpreter (docs/sglang.md)"
	@echo "make lint    ruff, mypy, buf (lint, breaking, generated code up to date)"
	@echo "make proto   regenerate shared/specfleet/wire from protos"
	@echo "make bench   the benchmarks that run without a GPU"
	@echo "make bench-strategies DATA=conversations.jsonl.gz"
	@echo "             trains every strategy and compares acceptance lengths: minutes on a GPU (benchmarks/README.md)"
	@echo "make bench-serving DATA=conversations.jsonl.gz"
	@echo "             drafts from capture to real SGLang serving: tokens/s and acceptance length, on a GPU"
	@echo "make clean   remove .venv, .venv-sglang*, caches and run directories"

# The stamps depend on pyproject.toml: a changed dependency is installed on the next call.
.venv/.local.stamp: pyproject.toml constraints/cpu.txt scripts/setup.sh
	@scripts/setup.sh local
	@touch $@
.venv/.dev.stamp: pyproject.toml constraints/cpu.txt scripts/setup.sh
	@scripts/setup.sh dev
	@touch $@ .venv/.local.stamp

.venv-sglang/.stamp: pyproject.toml constraints/sglang-cpu.txt scripts/setup.sh scripts/torchvision_shim.py
	@scripts/setup.sh sglang
	@touch $@

setup: .venv/.dev.stamp

sglang: .venv-sglang/.stamp

demo: .venv/.local.stamp
	$(BIN)/specctl demo

test: .venv/.dev.stamp .venv-sglang/.stamp
	$(BIN)/pytest $(PYTEST_ARGS)

test-sglang: .venv/.dev.stamp
	SPECFLEET_SGLANG_PYTHON=$(abspath $(SGLANG_PYTHON)) \
	$(BIN)/pytest $(addprefix tests/integration/test_sglang_,plugin.py patch.py capture.py) $(PYTEST_ARGS)

lint: .venv/.dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint
	scripts/proto-check.sh

proto: .venv/.dev.stamp
	scripts/proto.sh

bench: .venv/.dev.stamp
	$(PY) benchmarks/ledger_throughput.py
	$(PY) -m benchmarks.store_throughput

bench-strategies: .venv/.local.stamp
	$(PY) -m benchmarks.strategies $(if $(DATA),--data $(DATA)) $(BENCH_ARGS)

bench-serving: .venv/.local.stamp
	$(PY) -m benchmarks.serving $(if $(DATA),--data $(DATA)) $(BENCH_ARGS)

clean:
	rm -rf .venv .venv-sglang* .specfleet runs dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
