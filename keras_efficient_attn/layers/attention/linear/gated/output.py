"""The norm and the gate after the heads of layers with decays or the delta rule."""

import dataclasses

import keras

from keras_efficient_attn.layers.arguments import activation_of
from keras_efficient_attn.layers.options import Options
from keras_efficient_attn.ops.common.checks import (
    check_name,
    check_positive_int,
    check_positive_number,
)


@dataclasses.dataclass(frozen=True)
class OutputNorm(Options):
    """The norm of each head's output, a vector `x` of `value_dim` entries.

    ```
    gain ⊙ (x − μ) / √(mean of (x − μ)² + epsilon)
    ```

    Args:
        kind: `"rms"`: μ is 0, and all heads share the gain. `"group"`: μ is the mean of
            `x`, and each head has a gain.
        epsilon: Added to the mean square or the variance. Defaults to 1e-5.
        scale: Whether the norm has a learned gain. Defaults to `True`.

    Raises:
        ValueError: For an invalid value.

    Example:

    >>> from keras_efficient_attn import DeltaAttention, OutputNorm
    >>> norm = OutputNorm("rms", epsilon=1e-6, scale=False)
    >>> layer = DeltaAttention(num_heads=4, key_dim=16, output_norm=norm)

    Reference:
        - [Zhang and Sennrich, 2019](https://arxiv.org/abs/1910.07467), `"rms"`
        - [Wu and He, 2018](https://arxiv.org/abs/1803.08494), `"group"`
    """

    kind: str
    epsilon: float = 1e-5
    scale: bool = True

    def __post_init__(self):
        super().__post_init__()
        check_name("kind", self.kind, ("rms", "group"))
        check_positive_number("epsilon", self.epsilon)


@dataclasses.dataclass(frozen=True)
class OutputGate(Options):
    """The gate that multiplies the heads: `activation(W x)` of the query input.

    `use_gate` of `keras.layers.MultiHeadAttention` is another, sigmoid, gate.

    Args:
        activation: Name of an activation, or a function.
        rank: Rank of W. Defaults to `None`: full (`KimiDeltaAttention`: `value_dim`).
        bias: Whether the projection has a bias. Defaults to `False`.

    Raises:
        ValueError: For an invalid value.

    Example:

    >>> from keras_efficient_attn import GatedDeltaAttention, OutputGate
    >>> gate = OutputGate("sigmoid", rank=8)
    >>> layer = GatedDeltaAttention(num_heads=4, key_dim=16, output_gate=gate)
    """

    activation: object
    rank: int | None = None
    bias: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_positive_int("rank", self.rank, optional=True)
        if self.activation is None or isinstance(self.activation, keras.Layer):
            raise ValueError(
                "`activation` must name an activation, or be a function without "
                "weights: for no gate, pass output_gate=None. Received: "
                f"activation={self.activation}"
            )
        # Through `object`, because the class is frozen.
        function = activation_of("activation", self.activation)
        object.__setattr__(self, "activation", function)

    def get_config(self):
        activation = keras.activations.serialize(self.activation)
        return {**super().get_config(), "activation": activation}
