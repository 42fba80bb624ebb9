# `make train` and `make test` do all of their own set-up in .venv.
# BACKEND=tensorflow|jax|torch selects a backend: the one to train on (default
# jax), or the only one to test (default: all three).

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

TRAIN_BACKEND = $(or $(BACKEND),jax)
TEST_BACKENDS = $(or $(BACKEND),tensorflow jax torch)
KNOWN_BACKENDS = tensorflow jax torch

ifneq ($(filter-out $(KNOWN_BACKENDS),$(BACKEND)),)
$(error BACKEND must be one of $(KNOWN_BACKENDS); received BACKEND=$(BACKEND))
endif

empty :=
space := $(empty) $(empty)
comma := ,
TRAIN_SETUP = $(VENV)/.installed-examples-$(TRAIN_BACKEND)
TEST_SETUP = $(VENV)/.installed-test-$(subst $(space),-,$(TEST_BACKENDS))

DOCS_SETUP = $(VENV)/.installed-docs
EXPORT_SETUP = $(VENV)/.installed-test-export
TPU_SETUP = $(VENV)/.installed-test-jax-tpu-compile

FORCED_CONTRACT = TRITON_INTERPRET=1 $(VENV)/bin/python -m pytest -q -n 2 \
    tests/contract -k "favor+ and not favor++"

# The layers whose estimates tools/tpu_estimates.json has, and their shape.
ESTIMATED = --layers softmax linear performer local sparse vq adaptive-span retention \
    delta gated-linear gated-delta kimi-delta reformer --lengths 16384 --heads 8 --head-dim 128 \
    --dtype mixed_bfloat16 --causal --mode train

# The Python of `make gpu`, and a folder of packages that it imports before others.
GPU_PYTHON = $(firstword $(wildcard $(VENV)/bin/python) $(PYTHON))
GPU_PACKAGES = $(abspath $(VENV)-gpu)

.PHONY: train train-teacher test test-all test-accelerators test-export tpu-estimates gpu docs fuzz kills long-runs lint package

train: $(TRAIN_SETUP)
	$(VENV)/bin/python examples/train_byte_lm.py --backend $(TRAIN_BACKEND) $(ARGS)

# The byte model that examples/distill_byte_lm.py converts, kept in runs/teacher/seed-0.
train-teacher: $(TRAIN_SETUP)
	$(VENV)/bin/python examples/distill_byte_lm.py --only-teacher \
	    --backend $(TRAIN_BACKEND) $(ARGS)

# The gate: what a change has to pass.
test: $(TEST_SETUP)
	$(VENV)/bin/python tests/run_matrix.py $(TEST_BACKENDS) -- $(ARGS)

# Everything: the gate, what is marked `nightly`, every variant on every backend, the
# contract with the defaults of users, exports, accelerators, fuzz and kills.
test-all: $(TEST_SETUP)
	$(VENV)/bin/python tests/run_matrix.py --all $(TEST_BACKENDS) -- $(ARGS)
	$(MAKE) test-export test-accelerators

# Random calls of every layer: ten thousand a backend, others with another FUZZ_SEED.
fuzz: $(TEST_SETUP)
	for backend in $(TEST_BACKENDS); do \
	    FUZZ_EXAMPLES=$(or $(FUZZ_EXAMPLES),10000) FUZZ_SEED=$(or $(FUZZ_SEED),1) \
	    KERAS_BACKEND=$$backend $(VENV)/bin/python -m pytest -q tests/fuzz \
	        $(ARGS) || exit 1; \
	done

# Training that is killed at random moments, ten times a backend, and goes on.
kills: $(TEST_SETUP)
	for backend in $(TEST_BACKENDS); do \
	    KERAS_BACKEND=$$backend $(VENV)/bin/python -m tests.examples.kill_training \
	        $(ARGS) || exit 1; \
	done

# Streams of 100,000 positions, and a million steps of codes and counters.
long-runs: $(TEST_SETUP)
	KERAS_BACKEND=jax $(VENV)/bin/python -m tests.long_runs $(ARGS)
	KERAS_BACKEND=jax $(VENV)/bin/python -m tests.long_runs.steps

# Attention layers compiled for a TPU that need not be there, and the contract of
# PerformerAttention with the kernels, interpreted.
test-accelerators: $(TPU_SETUP)
	FORCED_KERNEL=pallas KERAS_BACKEND=jax $(FORCED_CONTRACT) $(ARGS)
	FORCED_KERNEL=triton KERAS_BACKEND=torch $(FORCED_CONTRACT) $(ARGS)
	KERAS_BACKEND=jax JAX_PLATFORMS=cpu $(VENV)/bin/python -m pytest -q -n 2 -rP \
	    tests/accelerators $(ARGS)

# What the TPU's compiler expects of layers, compared with the estimates of the
# repository; ARGS="--save tools/tpu_estimates.json" writes those of now.
tpu-estimates: $(TPU_SETUP)
	KERAS_BACKEND=jax JAX_PLATFORMS=cpu $(VENV)/bin/python -m tools.compile_for_tpu \
	    $(ESTIMATED) --against tools/tpu_estimates.json $(ARGS)

# Tests and measurements on an NVIDIA GPU, with PyTorch and JAX, in at most nine minutes,
# in runs/gpu. WHEELS is a folder of the wheels that this machine lacks; they are
# installed without a network, and without asking whether their versions agree; tests
# need pytest's. ARGS="--dry-run" needs no GPU.
gpu:
	$(if $(WHEELS),$(GPU_PYTHON) -m pip install --quiet --no-index --no-deps \
	    --upgrade --target $(GPU_PACKAGES) $(WHEELS)/*.whl)
	PYTHONPATH="$(GPU_PACKAGES):$$PYTHONPATH" $(GPU_PYTHON) -m tools.measure_gpu --since $(shell date +%s) $(ARGS)

# What other runtimes give for exported layers and models.
test-export: $(EXPORT_SETUP)
	for backend in tensorflow jax; do \
	    KERAS_BACKEND=$$backend $(VENV)/bin/python -m pytest -q -n 2 -m export \
	        tests/export $(ARGS) || exit 1; \
	done

# The documentation, in site; every warning is an error.
docs: $(DOCS_SETUP)
	$(VENV)/bin/mkdocs build --strict

lint: $(TEST_SETUP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

# The source distribution and the wheel, in dist. The wheel is installed into an
# environment of its own, where README's examples and a script of examples run.
package:
	rm -rf dist $(VENV)-release $(VENV)-package
	$(PYTHON) -m venv $(VENV)-release
	$(VENV)-release/bin/pip install --quiet "build>=1.2" "twine>=6"
	$(VENV)-release/bin/python -m build --outdir dist .
	$(VENV)-release/bin/twine check --strict dist/*
	$(PYTHON) -m venv $(VENV)-package
	$(VENV)-package/bin/pip install --quiet -c constraints.txt \
	    "$$(ls $(CURDIR)/dist/*.whl)[examples,$(TRAIN_BACKEND)]"
	.ci/check_package $(abspath $(VENV)-package) $(TRAIN_BACKEND)

$(TPU_SETUP): $(TEST_SETUP)
	$(VENV)/bin/pip install --quiet -c constraints.txt -e ".[test,jax,tpu-compile]"
	touch $@

$(EXPORT_SETUP): $(TEST_SETUP)
	$(VENV)/bin/pip install --quiet -c constraints.txt -e ".[test,tensorflow,jax,export]"
	touch $@

# The pages are made from the source, which need not be installed.
$(DOCS_SETUP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet -c constraints.txt -e ".[docs]"
	touch $@

# A stamp records a finished installation, so that a second run installs nothing.
$(TRAIN_SETUP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet -c constraints.txt \
	    -e ".[examples,$(TRAIN_BACKEND)]"
	touch $@

$(TEST_SETUP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet -c constraints.txt \
	    -e ".[test,$(subst $(space),$(comma),$(TEST_BACKENDS))]"
	touch $@
