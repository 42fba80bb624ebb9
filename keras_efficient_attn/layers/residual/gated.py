"""GatedResidual: gates instead of residual connections."""

import keras
from keras import ops

from keras_efficient_attn.layers.arguments import KeepsArguments
from keras_efficient_attn.ops.common.checks import (
    check_name,
    check_number,
    may_agree,
)
from keras_efficient_attn.ops.common.numerics import hyperbolic_tangent, matrix_product

BIAS = 2.0
# The square matrices of each gate: W multiplies the update, U the stream.
KERNELS = {
    "gru": (
        "reset_update",
        "reset_stream",
        "gate_update",
        "gate_stream",
        "candidate_update",
        "candidate_stream",
    ),
    "input": ("gate_stream",),
    "output": ("gate_stream",),
    "highway": ("gate_stream",),
    "sigmoid_tanh": ("gate_update", "candidate_update"),
}


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class GatedResidual(KeepsArguments, keras.layers.Layer):
    """A learned gate between a residual stream and a sublayer's update.

    ```
    gru:           z ⊙ h + (1 − z) ⊙ x,     z = σ(W_z y + U_z x − b),
                   h = tanh(W_h y + U_h (r ⊙ x)),  r = σ(W_r y + U_r x)
    input:         σ(U x) ⊙ x + y
    output:        x + σ(U x − b) ⊙ y
    highway:       g ⊙ x + (1 − g) ⊙ y,     g = σ(U x + b)
    sigmoid_tanh:  x + σ(W_z y − b) ⊙ tanh(W_h y)
    ```

    A positive bias starts a block near the identity, which lets a reinforcement learner
    act on its observations before it can use its memory. In a GTrXL block the sublayers
    read `norm(x)`, and `y` is the ReLU of their output; `residual="gated"` of
    `keras_efficient_attn.models` does so.

    Args:
        gate: `"gru"` (the default), `"input"`, `"output"`, `"highway"` or
            `"sigmoid_tanh"`.
        bias: Initial value of the learned bias vector `b`. The gate `"input"` has no
            bias and raises for another value. Defaults to 2.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: `(..., dim)`, the stream.
        y: `(..., dim)`, the update.

    Returns:
        A tensor of the shape of `x`.

    Raises:
        ValueError: For an unknown `gate`, a `bias` that is not a number, or shapes that
            differ.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import GatedResidual
    >>> x, y = keras.random.normal((2, 2, 10, 64))
    >>> GatedResidual()(x, y).shape
    (2, 10, 64)

    Reference:
        - [Parisotto et al., 2019](https://arxiv.org/abs/1910.06764)
    """

    def __init__(self, gate="gru", bias: float = BIAS, **kwargs):
        super().__init__(**kwargs)
        check_name("gate", gate, KERNELS)
        check_number("bias", bias)
        if gate == "input" and bias != BIAS:
            raise ValueError(
                f"gate='input' has no `bias`: leave it out. Received: bias={bias!r}"
            )
        self.keep(locals())

    def build(self, x_shape, y_shape):
        if not may_agree(x_shape, y_shape):
            raise ValueError(
                "`x` and `y` must have the same shape. Received: "
                f"x.shape={tuple(x_shape)}, y.shape={tuple(y_shape)}"
            )
        dim = x_shape[-1]
        self._kernels = {
            name: self.add_weight(name=name, shape=(dim, dim))
            for name in KERNELS[self.gate]
        }
        if self.gate != "input":
            self._bias = self.add_weight(
                name="bias",
                shape=(dim,),
                initializer=keras.initializers.Constant(self.bias),
            )

    def call(self, x, y):
        def product(name, tensor):
            return matrix_product(tensor, self._kernels[name])

        if self.gate == "gru":
            reset = product("reset_update", y) + product("reset_stream", x)
            logit = product("gate_update", y) + product("gate_stream", x) - self._bias
            gate = ops.sigmoid(logit)
            candidate = hyperbolic_tangent(
                product("candidate_update", y)
                + product("candidate_stream", ops.sigmoid(reset) * x)
            )
            return (1 - gate) * x + gate * candidate
        if self.gate == "input":
            return ops.sigmoid(product("gate_stream", x)) * x + y
        if self.gate == "output":
            return x + ops.sigmoid(product("gate_stream", x) - self._bias) * y
        if self.gate == "highway":
            gate = ops.sigmoid(product("gate_stream", x) + self._bias)
            return gate * x + (1 - gate) * y
        gate = ops.sigmoid(product("gate_update", y) - self._bias)
        return x + gate * hyperbolic_tangent(product("candidate_update", y))

    def compute_output_shape(self, x_shape, y_shape):
        return x_shape
