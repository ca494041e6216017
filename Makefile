# Everything a fresh machine needs: Python 3.11 to 3.13, pip and a package registry.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := 2.13.0

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-gloo test-torch docs pictures bench bench-exposed bench-faults check sanitize wheels
.PHONY: install clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 19

install: $(STAMP) ## Make .venv with torch and Paceline in it (the other targets do this by themselves)

# torch first and by its exact version, so that no other package pulls another one. It is the newest with a small build
# for the CPU. Unless TORCH is given, a torch that is already in the environment stays if pyproject.toml allows it.
HAS_TORCH := import importlib.metadata, sys; sys.exit(not "2.11" <= importlib.metadata.version("torch")[:4] < "2.16")
KEEP_TORCH := $(if $(filter file,$(origin TORCH)),$(BIN)/python -c '$(HAS_TORCH)' 2>/dev/null ||)
$(STAMP): pyproject.toml setup.py $(wildcard src/paceline/transport/native/*)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch and paceline into $(VENV) ..."
	@$(KEEP_TORCH) $(BIN)/python -m pip install --disable-pip-version-check 'torch==$(TORCH)'
	@$(BIN)/python -m pip install --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(STAMP) ## Cure a slow program, then tune a small GPT-2 for a slow network (3 minutes after the install)
	$(BIN)/paceline demo
	$(BIN)/paceline tune --model gpt2-tiny --network 1gbe --network-ranks 8 --threads 1 --quick

# Three workers, because rank tests often wait; each has warm ranks of its own, and a file of tests stays on one of
# them. The long files come first, so that all workers end at about the same time.
# Bytecode is cached even where the environment forbids it: without a cache, each of several hundred processes compiles
# its modules again, and collecting the tests takes 15 instead of 7 seconds of CPU time.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
test: $(STAMP) ## Run the tests, without the slow ones (minutes on two cores)
	$(PYTEST) -m "not slow"

# Attacks of another user (root) need the host for themselves.
test-all: $(STAMP) ## Run all tests, the slow matrices too
	$(PYTEST)
	$(BIN)/python -m pytest tests/dist/test_trust.py

test-gloo: $(STAMP) ## Run the tests with real ranks once more, all on gloo
	PACELINE_TEST_BACKEND=gloo $(PYTEST) tests/dist

test-torch: ## Run the tests in an environment for one torch: make test-torch TORCH=2.15.0 [PYTHON=python3.12]
	$(MAKE) test TORCH=$(TORCH) VENV=build/torch-$(TORCH)-$(notdir $(PYTHON))

check: $(STAMP) ## Lint, format and type-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Pictures and outputs that the documents quote; needs Chromium and an idle machine.
pictures: $(STAMP) ## Make the screenshots, recordings and notebook outputs of the documents again (5 minutes)
	PACELINE_UPDATE_SCREENSHOTS=1 $(BIN)/python -m pytest -q tests/cli/test_page_in_browser.py -k screenshot
	PATH=$(abspath $(BIN)):$$PATH docs/record.py demo -- paceline demo
	$(BIN)/python docs/tutorial/execute.py

# A warning is an error. The site needs no server and no network: open its first page in a browser.
docs: $(VENV)/.docs ## Make a site of the documents, with the reference of the API, in build/site
	$(BIN)/python -m sphinx -W --keep-going --quiet --jobs auto -c docs -d build/site-cache . build/site
	@echo "open build/site/index.html"

$(VENV)/.docs: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,docs]'
	@touch $@

# What a sanitizer finds ends the program. Forked ranks for the one that knows memory, threads for the one that knows them.
CORE := src/paceline/transport/native
FUZZ = $(CC) -std=gnu11 -O2 -g -Wall -Wextra -Werror -ffp-contract=off -pthread -I$(CORE) tests/native/fuzz.c $(CORE)/*.c -lm
sanitize: ## Fuzz the C core under AddressSanitizer, UBSan and ThreadSanitizer (a minute)
	@mkdir -p build
	$(FUZZ) -fsanitize=address,undefined -fno-sanitize-recover=all -o build/fuzz-address
	build/fuzz-address processes 15
	build/fuzz-address threads 10
	$(FUZZ) -fsanitize=thread -o build/fuzz-thread
	TSAN_OPTIONS=halt_on_error=1 build/fuzz-thread threads 20

# The core needs no glibc newer than torch does. The source archive carries both cores, for hosts without a compiler.
GLIBC := 2_28
PACK := build/packaging
wheels: ## Build wheels for x86_64 and aarch64 and a source archive into dist/ (needs a gcc for each)
	@rm -rf $(PACK) prebuilt dist/paceline-* && mkdir -p dist prebuilt
	@$(PYTHON) -m venv $(PACK)
	@$(PACK)/bin/python -m pip install --quiet --disable-pip-version-check build
	$(PACK)/bin/python -m build --sdist --outdir $(PACK)
	set -e; for machine in x86_64 aarch64; do \
	  CC="$$machine-linux-gnu-gcc -DPLN_OLD_GLIBC -Wl,--no-as-needed -l:libpthread.so.0" \
	  $(PACK)/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist \
	    --config-settings=--build-option=--plat-name=manylinux_$(GLIBC)_$$machine $(PACK)/paceline-*.tar.gz; \
	  $(PACK)/bin/python -m zipfile -e dist/*_$$machine.whl $(PACK)/$$machine; \
	  mv $(PACK)/$$machine/paceline/transport/_native.so prebuilt/$$machine.so; \
	done
	$(PACK)/bin/python -m build --sdist --outdir dist
	@rm -r prebuilt

bench: $(STAMP) ## Run what needs time and a quiet machine; results go to runs/
	$(BIN)/python benchmarks/engine_against_loop.py
	$(BIN)/python benchmarks/validate_traces.py
	$(BIN)/paceline bench allreduce --backend gloo,paceline --memory ordinary,shared --limit --ranks 2,4 \
	  --sizes 4KiB,64KiB,1MiB,10MiB,100MiB
	$(BIN)/paceline bench allreduce --backend gloo,paceline --ranks 2 --sizes 4B,256B,4KiB,16KiB --iters 300 --warmup 20
	$(BIN)/paceline bench chunks --backend gloo,paceline
	$(BIN)/paceline bench wrappers --backend gloo,paceline --wrapper bare,torch,torch-tuned,paceline
	$(BIN)/python benchmarks/validate_public.py
	$(BIN)/python benchmarks/validate_networks.py --runs results/*/allreduce* results/*/scale-ranks
	$(BIN)/python benchmarks/validate_ranks.py results/*/scale-ranks
	$(BIN)/python benchmarks/verdicts.py
	$(BIN)/python benchmarks/validate_tuning.py
	$(BIN)/python benchmarks/validate_attach.py overhead
	$(BIN)/python benchmarks/watch_cost.py

# Ratios of steps in turns, with their intervals. Links are made of network namespaces, which needs root, `ip` and `tc`.
# The model of transformers runs where that is installed; CSV=FOLDER has the tables of docs/bucket-size.md.
ROWS := $(BIN)/python benchmarks/embedding_rows.py
bench-exposed: $(STAMP) ## Measure what stays exposed: embeddings, small messages (quiet machine, root)
	$(ROWS) --rate 1gbit
	$(ROWS) --rate 100mbit --rounds 20
	@if $(BIN)/python -c 'import transformers' 2>/dev/null; then $(ROWS) --rate 1gbit --model hf; \
	  else echo "transformers is not installed: $(BIN)/pip install -e '.[hf]'"; fi
	$(BIN)/paceline bench allreduce --backend gloo,shm --ranks 2 --sizes 4B,256B,4KiB,16KiB --iters 300 --warmup 20
	@test -z "$(CSV)" || $(BIN)/paceline predict --csv "$(CSV)"

bench-faults: $(STAMP) ## Measure the bars of docs/faults.md, hours of faults and noise (root); results go to runs/faults
	PYTHON=$(BIN)/python benchmarks/faults.sh runs/faults

clean: ## Remove .venv and caches (runs/ stays)
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
