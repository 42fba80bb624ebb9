"""A short convolution that encodes the order of a block's inputs."""

import keras
from keras import ops

from keras_efficient_attn.layers.arguments import KeepsArguments
from keras_efficient_attn.ops.common.checks import check_int
from keras_efficient_attn.ops.common.convolution import causal_convolution


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
        state: Optional, from `get_initial_state` or the previous segment's call: the
            last `kernel_size - 1` inputs.

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

    def __init__(self, kernel_size=4, **kwargs):
        super().__init__(**kwargs)
        check_int("kernel_size", kernel_size, 2)
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

    def call(self, x, state=None):
        output, last = causal_convolution(x, self.kernel, state)
        output = x + output
        return output if state is None else (output, last)

    def compute_output_shape(self, input_shape):
        return input_shape
