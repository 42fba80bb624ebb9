"""A converted layer that is called by no block, with masks of several kinds."""

import inspect

import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.models import convert_backbone
from tests.autodiff import to_numpy
from tests.models.conversion import families

# A name for each class of adapter of causal layers.
NAMES = ("gpt2", "opt", "llama", "mistral", "gemma", "gemma3", "qwen3", "t5")
LENGTH = 6
CAUSAL = np.tril(np.ones((1, LENGTH, LENGTH), bool))
PADDING = np.arange(LENGTH) < np.array([[4], [6]])
PREFIX = CAUSAL | (np.arange(LENGTH) < 3)
DOCUMENTS = CAUSAL & (np.arange(LENGTH)[:, None] // 3 == np.arange(LENGTH) // 3)
HOLE = CAUSAL & ~np.eye(LENGTH, k=-2, dtype=bool)
OTHERS = {
    "prefix": PREFIX,
    "full": np.ones_like(CAUSAL),
    "documents": DOCUMENTS,
    "hole": HOLE,
    "later": ~CAUSAL,
}
X = np.random.default_rng(0).normal(size=(2, LENGTH, 16)).astype("float32")


def layers(name):
    """The first causal self-attention layer of a family, and its adapter."""
    backbone = families.make(name, num_layers=1)
    efficient = convert_backbone(backbone, "local:window=64")
    sites = [site for site in efficient.attention_sites if site.is_causal]
    adapter = sites[0].layer
    stock = [x for x in backbone._flatten_layers() if x.path == adapter.path]
    return stock[0], adapter


def call(layer, mask):
    """The layer's output, whose name for the mask differs between families."""
    x = ops.convert_to_tensor(X)
    arguments = inspect.signature(type(layer).call).parameters
    mask = {"attention_mask" if "attention_mask" in arguments else "mask": mask}
    output = layer(x, x, **mask) if "value" in arguments else layer(x, **mask)
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("name", NAMES)
def test_masks(name):
    stock, adapter = layers(name)
    for mask in (CAUSAL, CAUSAL & PADDING[:, None]):
        mask = np.broadcast_to(mask, (2, LENGTH, LENGTH))
        expected, received = (to_numpy(call(x, mask)) for x in (stock, adapter))
        # Padded queries are nobody's.
        seen = PADDING[..., None]
        np.testing.assert_allclose(received * seen, expected * seen, atol=1e-4)
    for mask in OTHERS.values():
        if name == "mistral" and mask is DOCUMENTS:
            continue
        with pytest.raises(ValueError, match="attention_mask=shape"):
            call(adapter, np.broadcast_to(mask, (2, LENGTH, LENGTH)))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_compiled_calls(name, backend):
    _, adapter = layers(name)
    if backend == "jax":
        import jax

        compiled = jax.jit(lambda mask: call(adapter, mask))
    elif backend == "tensorflow":
        import tensorflow as tf

        compiled = tf.function(lambda mask: call(adapter, mask))
    else:
        pytest.skip("PyTorch computes eagerly; `torch.compile` takes long")
    causal, prefix = (np.repeat(m, 2, 0) for m in (CAUSAL, PREFIX))
    expected = to_numpy(call(adapter, causal))
    np.testing.assert_allclose(to_numpy(compiled(causal)), expected, atol=1e-5)
    assert np.isnan(to_numpy(compiled(prefix))).all()


@pytest.mark.any_backend
def test_no_mask_and_symbolic_calls():
    _, adapter = layers("llama")
    with pytest.raises(ValueError, match="attention_mask=None"):
        call(adapter, None)
    x, mask = keras.Input((LENGTH, 16)), keras.Input((LENGTH, LENGTH), dtype="bool")
    with pytest.raises(ValueError, match="symbolic inputs"):
        adapter(x, attention_mask=mask)


@pytest.mark.any_backend
def test_a_window_hides_far_keys():
    _, adapter = layers("mistral")
    band = CAUSAL & np.triu(np.ones_like(CAUSAL), -3)
    received, expected = (to_numpy(call(adapter, m)) for m in (band, CAUSAL))
    np.testing.assert_array_equal(received, expected)
