"""The feed-forward network of a Transformer block."""

import dataclasses
from collections.abc import Callable

import keras
from keras import ops

from keras_efficient_attn.layers.arguments import (
    KeepsArguments,
    dense_layer,
)
from keras_efficient_attn.layers.options import Options
from keras_efficient_attn.layers.quantization import KeepsQuantization
from keras_efficient_attn.ops.common.checks import (
    check_bool,
    check_positive_int,
    check_rate,
)


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
def squared_relu(x):
    """`relu(x)²`, of [Primer](https://arxiv.org/abs/2109.08668)."""
    return ops.square(ops.relu(x))


def get_activation(identifier):
    """Keras' activation of that name, or `"squared_relu"`, or a callable."""
    if identifier == "squared_relu":
        return squared_relu
    return keras.activations.get(identifier)


def serialize_activation(activation):
    """An activation in a form that JSON holds and `get_activation` reads."""
    if activation in (squared_relu, "squared_relu"):
        return "squared_relu"
    return keras.activations.serialize(keras.activations.get(activation))


def make_dense(layer, name, input_shape):
    """A built dense layer of a feed-forward network.

    Args:
        layer: The network, with a `hidden_dim`, an `activation` and `use_bias`.
        name: `"hidden"`, with the activation; `"gate"`, or `"output"`, back to the
            width of the input.
        input_shape: Shape of the network's input.
    """
    widths = input_shape[-1], layer.hidden_dim
    if name == "output":
        widths = widths[::-1]
    dense = dense_layer(
        widths[1],
        activation=layer.activation if name == "hidden" else None,
        use_bias=layer.use_bias,
        dtype=layer.dtype_policy,
        name=name,
    )
    dense.build((*input_shape[:-1], widths[0]))
    return dense


@dataclasses.dataclass(frozen=True)
class FeedForwardOptions(Options):
    """The feed-forward networks of a backbone, which follow attention in a block.

    Args:
        activation: Name of a Keras activation, `"squared_relu"`, or a callable.
            Defaults to `"gelu"`.
        gated: Whether the networks are gated linear units. Defaults to `False`.
        chunk_size: Positions to process at once, recomputed for the gradient
            (`keras_efficient_attn.ChunkedFeedForward`). Defaults to `None`: all
            positions.
        separable_convolution: Whether a `SeparableConvolution` of the same width
            replaces the dense layers. Defaults to `False`.
        dropout: Rate of dropout on the input of the second dense layer. Defaults to 0.

    Raises:
        ValueError: For an unknown activation, a `dropout` that is no rate, separable
            convolutions that are gated, chunked or with dropout.
    """

    activation: str | Callable = "gelu"
    gated: bool = False
    chunk_size: int | None = None
    separable_convolution: bool = False
    dropout: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_rate("dropout", self.dropout)
        object.__setattr__(self, "activation", get_activation(self.activation))
        for name in ("gated", "chunk_size", "dropout"):
            if self.separable_convolution and getattr(self, name):
                raise ValueError(
                    f"`{name}` needs separable_convolution=False. Received: "
                    f"{name}={getattr(self, name)!r}, separable_convolution=True"
                )

    def get_config(self):
        activation = serialize_activation(self.activation)
        return {**super().get_config(), "activation": activation}


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class FeedForward(KeepsQuantization, KeepsArguments, keras.layers.Layer):
    """Two dense layers with an activation between, or a gated linear unit.

    ```
    y = activation(x W₁) W₂                gated=False
    y = (activation(x W₁) ⊙ x W₃) W₂       gated=True
    ```

    Args:
        hidden_dim: Width between the two layers.
        activation: Name of a Keras activation, `"squared_relu"`, or a callable.
            Defaults to `"gelu"`.
        gated: Whether to multiply by a second projection: with `"silu"` this is
            SwiGLU, with `"gelu"` GEGLU, with `"sigmoid"` GLU. Defaults to `False`.
        use_bias: Whether the dense layers have biases. Defaults to `True`.
        dropout: Rate of dropout on the input of the second layer. Defaults to 0.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: `(..., dim)`.
        training: Whether to apply dropout.

    Returns:
        A tensor of the same shape.

    Raises:
        ValueError: If `hidden_dim` is not a positive integer, `dropout` not at least 0
            and below 1, or the activation is unknown.

    Example:

    >>> import keras
    >>> from keras_efficient_attn.models import FeedForward
    >>> layer = FeedForward(256, activation="silu", gated=True)
    >>> layer(keras.random.normal((2, 10, 64))).shape
    (2, 10, 64)

    Reference:
        - [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762)
        - [Shazeer, 2020](https://arxiv.org/abs/2002.05202), the gated units
    """

    def __init__(
        self,
        hidden_dim,
        activation="gelu",
        gated: bool = False,
        use_bias: bool = True,
        dropout: float = 0.0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_positive_int("hidden_dim", hidden_dim)
        check_bool("gated", gated)
        check_bool("use_bias", use_bias)
        check_rate("dropout", dropout)
        self.keep(locals(), omit=("activation", "dropout"))
        self.activation = get_activation(activation)
        self.dropout = keras.layers.Dropout(
            dropout, dtype=self.dtype_policy, name="dropout"
        )

    def build(self, input_shape):
        self.hidden = make_dense(self, "hidden", input_shape)
        if self.gated:
            self.gate = make_dense(self, "gate", input_shape)
        self.output_dense = make_dense(self, "output", input_shape)

    def call(self, x, training=None):
        hidden = self.hidden(x)
        if self.gated:
            hidden = hidden * self.gate(x)
        return self.output_dense(self.dropout(hidden, training=training))

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return {
            **super().get_config(),
            "activation": serialize_activation(self.activation),
            "dropout": self.dropout.rate,
        }
