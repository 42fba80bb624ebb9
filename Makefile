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

TPU_SETUP = $(VENV)/.installed-test-jax-tpu-compile

FORCED_CONTRACT = TRITON_INTERPRET=1 $(VENV)/bin/python -m pytest -q -n 2 \
    tests/contract -k "favor+ and not favor++"

.PHONY: train test test-accelerators lint

train: $(TRAIN_SETUP)
	$(VENV)/bin/python examples/train_byte_lm.py --backend $(TRAIN_BACKEND) $(ARGS)

test: $(TEST_SETUP)
	$(VENV)/bin/python tests/run_matrix.py $(TEST_BACKENDS) -- $(ARGS)

# Attention layers compiled for a TPU that need not be there, and the contract of
# PerformerAttention with the kernels, interpreted.
test-accelerators: $(TPU_SETUP)
	FORCED_KERNEL=pallas KERAS_BACKEND=jax $(FORCED_CONTRACT) $(ARGS)
	FORCED_KERNEL=triton KERAS_BACKEND=torch $(FORCED_CONTRACT) $(ARGS)
	KERAS_BACKEND=jax JAX_PLATFORMS=cpu $(VENV)/bin/python -m pytest -q -n 2 -rP \
	    tests/accelerators $(ARGS)

lint: $(TEST_SETUP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

$(TPU_SETUP): $(TEST_SETUP)
	$(VENV)/bin/pip install --quiet -c constraints.txt -e ".[test,jax,tpu-compile]"
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
