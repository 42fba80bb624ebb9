"""Convolutions over positions: a short one for order, and in place of dense layers."""

import keras
from keras import ops

from keras_efficient_attn.layers.arguments import KeepsArguments, spec_with_state
from keras_efficient_attn.layers.attention.masks import zero_masked
from keras_efficient_attn.layers.keras_internals import implicit_mask
from keras_efficient_attn.layers.quantization import KeepsQuantization
from keras_efficient_attn.models.blocks.feed_forward import (
    get_activation,
    make_dense,
    serialize_activation,
)
from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.checks import (
    check_bool,
    check_int,
    check_positive_int,
    is_pair,
)
from keras_efficient_attn.ops.common.convolution import causal_convolution, depthwise
from keras_efficient_attn.ops.common.documents import Documents
from keras_efficient_attn.ops.common.rows import RowOrder, Rows, row_lengths
from keras_efficient_attn.ops.common.state import keep_last


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class CausalConvolution(KeepsArguments, keras.layers.Layer):
    """A depthwise convolution over the last positions, with a residual connection.

    ```
    y[t] = x[t] + Σ_i w[i] ⊙ x[t − kernel_size + 1 + i]
    ```

    It encodes the order of the tokens for attention, at any length.

    Args:
        kernel_size: Number of positions, including the current one. Defaults to 4.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: `(batch, length, dim)`.
        mask: Optional boolean `(batch, length)`: positions that are false do not exist.
        state: Optional, from `get_initial_state` or the previous segment's call: the
            last `kernel_size - 1` inputs.
        document_ids: Optional integers `(batch, length)`, without a `state`: a document
            begins where they change, and sees no other.

    Returns:
        A tensor of the shape of `x`; `(output, state)` with `state`.

    Raises:
        ValueError: If `kernel_size` is not an integer of at least 2.

    Example:

    >>> import keras
    >>> from keras_efficient_attn.models import CausalConvolution
    >>> layer = CausalConvolution(kernel_size=4)
    >>> layer(keras.random.normal((2, 10, 8))).shape
    (2, 10, 8)

    Reference:
        - [So et al., 2021](https://arxiv.org/abs/2109.08668)
    """

    def __init__(self, kernel_size: int = 4, **kwargs):
        super().__init__(**kwargs)
        check_int("kernel_size", kernel_size, 2)
        self.supports_masking = True
        self.keep(locals())

    def build(self, input_shape):
        self.kernel = self.add_weight(
            name="kernel",
            shape=(self.kernel_size, input_shape[-1]),
            initializer=keras.initializers.RandomUniform(-0.5, 0.5),
        )

    def get_initial_state(self, batch_size):
        """The state before the first position: `(batch, kernel_size - 1, dim)`."""
        return ops.zeros(
            (batch_size, self.kernel_size - 1, self.kernel.shape[-1]),
            self.compute_dtype,
        )

    def call(self, x, mask=None, state=None, document_ids=None):
        mask = implicit_mask(x) if mask is None else mask
        order = None if mask is None else RowOrder.of(mask)
        if order is not None:
            x = zero_masked(order.to_front(x), order.exists)
        lengths = None if state is None else row_lengths(mask)
        documents = None if document_ids is None else Documents.of(document_ids, order)
        output, last = causal_convolution(x, self.kernel, state, lengths, documents)
        output = x + output
        output = output if order is None else order.to_places(output)
        return output if state is None else (output, last)

    def compute_output_shape(self, input_shape):
        return input_shape

    def compute_output_spec(self, x, mask=None, state=None, document_ids=None):
        output = keras.KerasTensor(x.shape, dtype=self.compute_dtype)
        return spec_with_state(output, state)


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class SeparableConvolution(KeepsQuantization, KeepsArguments, keras.layers.Layer):
    """Two separable convolutions with an activation between them.

    ```
    y = (D₂ ∗ activation((D₁ ∗ x) W₁)) W₂
    ```

    with depthwise convolutions D over the positions: the alternative to `FeedForward`
    in the Universal Transformer.

    Args:
        hidden_dim: Width between the two convolutions.
        kernel_sizes: Kernel sizes of the two convolutions. Defaults to `(3, 5)`.
        activation: Name of a Keras activation, `"squared_relu"`, or a callable.
            Defaults to `"relu"`.
        causal: Whether they see earlier positions only; otherwise both sides equally.
            Defaults to `True`.
        use_bias: Whether the dense layers have biases. Defaults to `True`.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: `(batch, length, dim)`.
        mask: Optional boolean `(batch, length)`: positions that are false do not exist.
        state: Optional, from `get_initial_state` or the previous segment's call.
        document_ids: As for `CausalConvolution`.

    Returns:
        A tensor of the shape of `x`; `(output, state)` with `state`.

    Raises:
        ValueError: If `hidden_dim` is not a positive integer or `kernel_sizes` no pair
            of them, or on a call with `state` and without `causal`.

    Example:

    >>> import keras
    >>> from keras_efficient_attn.models import SeparableConvolution
    >>> layer = SeparableConvolution(64)
    >>> layer(keras.random.normal((2, 10, 16))).shape
    (2, 10, 16)

    Reference:
        - [Dehghani et al., 2019](https://arxiv.org/abs/1807.03819)
    """

    def __init__(
        self,
        hidden_dim,
        kernel_sizes=(3, 5),
        activation="relu",
        causal: bool = True,
        use_bias: bool = True,
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_positive_int("hidden_dim", hidden_dim)
        if not is_pair(kernel_sizes, 1):
            raise ValueError(
                "`kernel_sizes` must be a pair of positive integers. Received: "
                f"kernel_sizes={kernel_sizes!r}"
            )
        check_bool("causal", causal)
        check_bool("use_bias", use_bias)
        self.supports_masking = True
        kernel_sizes = tuple(kernel_sizes)
        self.keep(locals(), omit=("activation",))
        self.activation = get_activation(activation)

    def build(self, x_shape):
        widths = (x_shape[-1], self.hidden_dim)
        self.kernels = [
            self.add_weight(
                name=f"kernel_{i}",
                shape=(size, width),
                initializer=keras.initializers.RandomUniform(-(size**-0.5), size**-0.5),
            )
            for i, (size, width) in enumerate(
                zip(self.kernel_sizes, widths, strict=True)
            )
        ]

        self.hidden = make_dense(self, "hidden", x_shape)
        self.output_dense = make_dense(self, "output", x_shape)

    def get_initial_state(self, batch_size):
        """The state before the first position: the last inputs of each convolution."""
        return {
            name: ops.zeros(
                (batch_size, kernel.shape[0] - 1, kernel.shape[1]), self.compute_dtype
            )
            for name, kernel in zip(("x", "hidden"), self.kernels, strict=True)
        }

    def call(self, x, mask=None, state=None, document_ids=None):
        if state is not None and not self.causal:
            raise ValueError("`state` needs causal=True. Received: causal=False")
        mask = implicit_mask(x) if mask is None else mask
        before = {"x": None, "hidden": None} if state is None else state
        order = None if mask is None else RowOrder.of(mask)
        lengths = None if state is None else row_lengths(mask)
        x = x if order is None else order.to_front(x)
        exists = None if order is None else order.exists
        documents = None if document_ids is None else Documents.of(document_ids, order)
        rows = exists, Rows(lengths, documents)
        h, after_x = self._convolve(x, self.kernels[0], *rows, before["x"])
        h = self.hidden(h)
        h, after_hidden = self._convolve(h, self.kernels[1], *rows, before["hidden"])
        y = self.output_dense(h)
        y = y if order is None else order.to_places(y)
        return y if state is None else (y, {"x": after_x, "hidden": after_hidden})

    def _convolve(self, x, kernel, exists, rows, before):
        """The convolution, and the part of its input that the next segment needs.

        Args:
            x: `(batch, length, dim)`, what exists at the front of its row.
            kernel: `(kernel_size, dim)`.
            exists: Boolean `(batch, length)`, or `None` for all.
            rows: `Rows`.
            before: `(batch, kernel_size - 1, dim)`, or `None` at the start.
        """
        reach = kernel.shape[0] - 1
        x, length = zero_masked(x, exists), shape_of(x)[1]
        if before is None:
            after = 0 if self.causal else reach // 2
            return depthwise(x, kernel, reach - after, after, rows.documents), None
        padded = ops.concatenate([ops.cast(before, x.dtype), x], axis=1)
        return depthwise(padded, kernel), keep_last(padded, length, rows.lengths)

    def compute_output_shape(self, x_shape):
        return x_shape

    def compute_output_spec(self, x, mask=None, state=None, document_ids=None):
        output = keras.KerasTensor(x.shape, dtype=self.compute_dtype)
        return spec_with_state(output, state)

    def get_config(self):
        activation = serialize_activation(self.activation)
        return {**super().get_config(), "activation": activation}
