"""The language model: a decoder-only Transformer over bytes, in Keras layers."""

import math

import keras
from keras import ops

from byte_lm.errors import UsageError
from keras_efficient_attn.layers import get_attention

NUM_BYTES = 256
MHA = keras.layers.MultiHeadAttention
# A prime below 2^20, and a factor that keeps `hash * factor` below 2^31.
PRIME = 1_048_573
HASH_FACTOR = 2_039


@keras.saving.register_keras_serializable(package="byte_lm")
class BitsPerByte(keras.metrics.MeanMetricWrapper):
    """Mean cross-entropy of byte logits, in bits: `-log2 p(byte)`."""

    def __init__(self, name="bits_per_byte", dtype=None):
        super().__init__(_bits, name=name, dtype=dtype)
        self._direction = "down"

    def get_config(self):
        return {"name": self.name, "dtype": self.dtype}


def _bits(y_true, y_pred):
    nats = keras.losses.sparse_categorical_crossentropy(
        y_true, y_pred, from_logits=True
    )
    return nats / math.log(2)


@keras.saving.register_keras_serializable(package="byte_lm")
class CausalConv(keras.layers.Layer):
    """A depthwise convolution over the last `kernel_size` positions, as a residual.

    It tells the attention the order of the bytes, whatever the length, and streams:
    its state is the last `kernel_size - 1` inputs.
    """

    def __init__(self, kernel_size=4, **kwargs):
        super().__init__(**kwargs)
        self.kernel_size = kernel_size

    def build(self, input_shape):
        self.kernel = self.add_weight(
            name="kernel",
            shape=(self.kernel_size, input_shape[-1]),
            initializer=keras.initializers.RandomUniform(-0.5, 0.5),
        )

    def initial_state(self, batch_size):
        return ops.zeros(
            (batch_size, self.kernel_size - 1, self.kernel.shape[-1]),
            self.compute_dtype,
        )

    def call(self, x, state=None):
        length = ops.shape(x)[1]
        if state is None:
            padded = ops.pad(x, ((0, 0), (self.kernel_size - 1, 0), (0, 0)))
        else:
            padded = ops.concatenate([state, x], axis=1)
        output = x
        for i in range(self.kernel_size):
            output = output + self.kernel[i] * padded[:, i : i + length]
        if state is None:
            return output
        return output, padded[:, length:]

    def get_config(self):
        return {**super().get_config(), "kernel_size": self.kernel_size}


@keras.saving.register_keras_serializable(package="byte_lm")
class HashedNGrams(keras.layers.Layer):
    """Embeddings of the byte n-grams that end at each position, added up.

    An n-gram's hash picks a row of its order's table, as in the
    [Byte Latent Transformer](https://arxiv.org/abs/2412.09871). A look-up costs next
    to nothing beside a matrix product, and spares the blocks the learning of
    spelling. The state is the last `max(orders) - 1` bytes.
    """

    def __init__(self, dim, orders=(2, 3, 4, 5, 6), rows=2**14, width=32, **kwargs):
        super().__init__(**kwargs)
        self.dim = dim
        self.orders = tuple(orders)
        self.rows = rows
        self.width = width

    def build(self, input_shape):
        self.tables = self.add_weight(
            name="embedding_tables",
            shape=(len(self.orders) * self.rows, self.width),
            initializer=keras.initializers.RandomNormal(stddev=0.05),
        )
        self.kernel = self.add_weight(
            name="kernel", shape=(len(self.orders) * self.width, self.dim)
        )

    def initial_state(self, batch_size):
        return ops.zeros((batch_size, max(self.orders) - 1), "int32")

    def call(self, tokens, state=None):
        rows, length = ops.shape(tokens)[:2]
        past = self.initial_state(rows) if state is None else state
        # 0 stands for what is before the text; bytes are 1 to 256.
        padded = ops.concatenate([past, tokens + 1], axis=1)
        hashed = ops.zeros_like(tokens)
        indices = []
        for back in range(max(self.orders)):
            start = max(self.orders) - 1 - back
            hashed = (hashed * HASH_FACTOR + padded[:, start : start + length]) % PRIME
            if back + 1 in self.orders:
                indices.append(hashed % self.rows + len(indices) * self.rows)
        vectors = ops.take(self.tables, ops.stack(indices, axis=-1), axis=0)
        vectors = ops.reshape(vectors, (rows, length, len(self.orders) * self.width))
        output = ops.matmul(vectors, self.kernel)
        return output if state is None else (output, padded[:, length:])

    def get_config(self):
        return {
            **super().get_config(),
            "dim": self.dim,
            "orders": self.orders,
            "rows": self.rows,
            "width": self.width,
        }


def make_attention(spec, dim, heads, **kwargs):
    """The layer that an `--attention` names.

    Args:
        spec: `"name"` or `"name:option=value,option=value"`, with options of the
            layer's constructor.
        dim: Width of the model; a head gets `dim / heads` of it.
        heads: Number of heads.
        **kwargs: Further arguments of the layer.

    Raises:
        UsageError: For an unknown name, or options that the layer refuses.
    """
    if dim % heads:
        raise UsageError(
            f"--dim must be a multiple of --heads; received --dim {dim} --heads {heads}"
        )
    try:
        return get_attention(
            spec, num_heads=heads, key_dim=dim // heads, use_bias=False, **kwargs
        )
    except ValueError as error:
        raise UsageError(f"--attention {error}") from error


def check_attention(spec, dim, heads):
    """Raises `UsageError` if `make_attention` cannot make a layer of `spec`."""
    make_attention(spec, dim, heads)


def build_model(attention, layers, dim, heads):
    """A `keras.Model` from int32 bytes to float32 logits.

    Pre-norm blocks of attention and feed-forward network. The order of the bytes
    reaches them through the hashed n-grams and short convolutions, which hold at any
    length, so that the context has no limit.

    Args:
        attention: As `--attention`.
        layers: Number of blocks.
        dim: Width.
        heads: Attention heads of each block.
    """
    parts = {
        "bytes": keras.layers.Embedding(NUM_BYTES, dim, name="bytes"),
        "ngrams": HashedNGrams(dim, rows=128 * dim, name="ngrams"),
        "final_norm": _norm("final_norm"),
        "logits": keras.layers.Dense(
            NUM_BYTES, use_bias=False, dtype="float32", name="logits"
        ),
    }
    for i in range(layers):
        block = (
            _norm(f"attention_norm_{i}"),
            CausalConv(name=f"conv_{i}"),
            make_attention(attention, dim, heads, name=f"attention_{i}"),
            _norm(f"hidden_norm_{i}"),
            keras.layers.Dense(
                4 * dim, activation="relu", use_bias=False, name=f"hidden_{i}"
            ),
            keras.layers.Dense(dim, use_bias=False, name=f"output_{i}"),
        )
        parts |= {layer.name: layer for layer in block}
    tokens = keras.Input((None,), dtype="int32")
    logits, _ = _decode(parts, tokens)
    return keras.Model(tokens, logits, name="byte_lm")


def _norm(name):
    return keras.layers.LayerNormalization(center=False, name=name)


def is_streaming(model):
    """Whether all of a model's layers carry a state."""
    return all(
        hasattr(layer, "initial_state")
        for layer in model.layers
        if isinstance(layer, MHA)
    )


class StreamingModel(keras.Model):
    """Reads a text in segments, with the layers of a trained model.

    `stream({"tokens": tokens, "states": states})` gives `(logits, states)`.

    Args:
        model: A model of `build_model` whose layers all carry a state.
    """

    def __init__(self, model, **kwargs):
        super().__init__(**kwargs)
        self.parts = {layer.name: layer for layer in model.layers}
        # The layers have their weights.
        self.built = True

    def initial_states(self, batch_size):
        """The states before the text, by layer name."""
        return {
            name: layer.initial_state(batch_size)
            for name, layer in self.parts.items()
            if hasattr(layer, "initial_state")
        }

    def call(self, inputs):
        return _decode(self.parts, inputs["tokens"], inputs["states"])


def _decode(parts, tokens, states=None):
    """Logits of the next bytes, and the new states, from layers by name."""
    new_states = {}

    def apply(name, *inputs, **kwargs):
        if states is None or name not in states:
            return parts[name](*inputs, **kwargs)
        output, new_states[name] = parts[name](*inputs, **kwargs, state=states[name])
        return output

    x = parts["bytes"](tokens) + apply("ngrams", tokens)
    for i in range(sum(isinstance(layer, MHA) for layer in parts.values())):
        h = apply(f"conv_{i}", parts[f"attention_norm_{i}"](x))
        x = x + apply(f"attention_{i}", h, h, use_causal_mask=True)
        h = parts[f"hidden_{i}"](parts[f"hidden_norm_{i}"](x))
        x = x + parts[f"output_{i}"](ops.square(h))
    return parts["logits"](parts["final_norm"](x)), new_states


def compiled(model):
    """`model` for inference, compiled where the backend compiles."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        weights = (
            [variable.value for variable in model.trainable_variables],
            [variable.value for variable in model.non_trainable_variables],
        )
        call = jax.jit(
            lambda weights, inputs: model.stateless_call(*weights, inputs)[0]
        )
        return lambda inputs: call(weights, inputs)
    if backend == "tensorflow":
        import tensorflow as tf

        return tf.function(lambda inputs: model(inputs))
    import torch

    return torch.no_grad()(lambda inputs: model(inputs))
