"""Private functions of other libraries: each gone, in its turn."""

import functools
import importlib
import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_efficient_attn
from keras_efficient_attn import layers
from keras_efficient_attn.ops import local_attention, local_pattern
from tests.autodiff import to_numpy
from tests.ops.pieces import check_masked_softmax

PACKAGE = Path(keras_efficient_attn.__file__).parent
BACKEND = keras.backend.backend()
PRIVATE = re.compile(
    r"jax\._src|splash_attention_kernel\._|torch\._[a-zC]|aten\._|_C\._"
    r"|__internal__|tensorflow\.python|sys\._getframe|keras\.src"
)


def only_on(name):
    return pytest.mark.skipif(BACKEND != name, reason=f"private names of {name}")


def check_softmax(implementation=None):
    """Values and gradients of a causal window, compared with the formula."""
    random = np.random.default_rng(0)
    *tensors, weight = random.normal(size=(4, 2, 90, 2, 8)).astype("float32")
    options = dict(window=9, causal=True, implementation=implementation)
    check_masked_softmax(
        functools.partial(local_attention, **options),
        tensors,
        local_pattern(90, window=9, causal=True),
        weight,
        scale=8**-0.5,
    )


def train():
    """A training step of a layer that learns its codes in the forward pass."""
    layer = layers.VQAttention(2, 4, num_codes=3, window=4)
    return to_numpy(layer(*[np.ones((2, 8, 8), "float32")] * 2, training=True))


@pytest.mark.any_backend
def test_private_names_are_in_one_file_for_each_library():
    for path in PACKAGE.rglob("*.py"):
        internals = path.name in ("keras_internals.py", "keras_hub_internals.py")
        if not internals and not path.name.startswith("private_"):
            assert not PRIVATE.search(path.read_text()), path


@only_on("torch")
@pytest.mark.parametrize("name", ["fused_attention", "fused_attention_backward"])
def test_softmax_without_the_fused_kernel(name, monkeypatch):
    from keras_efficient_attn.ops.common import block_softmax, private_torch

    query = keras.ops.zeros((1, 4, 2, 8))
    assert block_softmax.fused_module(query) is not None
    monkeypatch.setattr(private_torch, name, None)
    assert block_softmax.fused_module(query) is None
    check_softmax()


@only_on("torch")
def test_layers_without_the_question_for_transforms(monkeypatch):
    import torch

    from keras_efficient_attn.ops.common import private_torch
    from keras_efficient_attn.ops.common.backend import in_function_transform

    asked = torch.func.grad(lambda x: x * in_function_transform())
    assert asked(torch.ones(())) == 1
    monkeypatch.setattr(private_torch, "function_transform", None)
    assert asked(torch.ones(())) == 0
    train()


@only_on("torch")
def test_the_number_of_programs_without_its_setting(monkeypatch):
    import torch

    from keras_efficient_attn.ops.common import private_torch

    before = torch._dynamo.config.recompile_limit
    with private_torch.allow_programs(before + 1):
        assert torch._dynamo.config.recompile_limit == before + 1
    monkeypatch.setattr(private_torch, "dynamo_config", None)
    with private_torch.allow_programs(before + 1):
        assert torch._dynamo.config.recompile_limit == before


@only_on("torch")
def test_a_compiled_question_without_the_hooks(monkeypatch):
    import torch

    from keras_efficient_attn.ops.common import private_torch
    from keras_efficient_attn.ops.reversible.remembered import is_replay

    monkeypatch.setattr(private_torch, "hooks_of_saved_tensors", None)

    def double_or_negate(x):
        return -x if is_replay() else 2 * x

    compiled = torch.compile(double_or_negate, backend="eager")
    assert compiled(torch.ones(())) == 2
    x = torch.ones((), requires_grad=True)
    block = torch.utils.checkpoint.checkpoint
    assert block(compiled, x, use_reentrant=False) == 2


@only_on("torch")
def test_without_the_backward_pass_the_error_names_the_function(monkeypatch):
    from keras_efficient_attn.ops.common import private_torch

    monkeypatch.setattr(private_torch, "number_of_backward_pass", None)
    with pytest.raises(RuntimeError, match=r"torch\._C\._current_graph_task_id.*2\.13"):
        train()


@only_on("tensorflow")
def test_without_the_recomputation_the_error_names_the_function(monkeypatch):
    from keras_efficient_attn.ops.common import private_tensorflow

    train()
    monkeypatch.setattr(private_tensorflow, "RECOMPUTING_FUNCTION", "gone")
    with pytest.raises(RuntimeError, match=r"custom_gradient\.gone.*2\.21"):
        train()


@only_on("jax")
@pytest.mark.parametrize(
    "changed", [None, lambda query, key: query], ids=["gone", "other-parameters"]
)
@pytest.mark.parametrize("name", ["query_gradient", "key_value_gradients"])
def test_softmax_without_the_gradients_of_splash(name, changed, monkeypatch):
    from keras_efficient_attn.ops.common import private_jax
    from keras_efficient_attn.ops.common.interval_softmax import choice

    assert private_jax.splash_obstacle() is None
    monkeypatch.setattr(private_jax, name, changed)
    # As on a TPU, where splash attention is the default.
    monkeypatch.setattr(choice, "has_kernels", lambda query: True)
    check_softmax()
    with pytest.raises(ValueError, match=r"_splash_attention_bwd_d.*JAX 0\.10"):
        check_softmax("splash")


@only_on("jax")
def test_softmax_without_splash(monkeypatch):
    from keras_efficient_attn.ops.common import private_jax
    from keras_efficient_attn.ops.common.interval_softmax import choice

    try:
        with monkeypatch.context() as patch:
            # None in its place makes an import of the module fail.
            patch.setitem(sys.modules, private_jax._MODULE, None)
            importlib.reload(private_jax)
            patch.setattr(choice, "has_kernels", lambda query: True)
            check_softmax()
            with pytest.raises(ValueError, match=r"_splash_attention_bwd_d.*JAX 0\.10"):
                check_softmax("splash")
    finally:
        importlib.reload(private_jax)
    assert private_jax.splash_obstacle() is None
