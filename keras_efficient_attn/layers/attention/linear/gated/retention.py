"""RetentionAttention: linear attention with a fixed decay per head."""

import math

import keras
from keras import ops

from keras_efficient_attn.layers.attention.linear.gated.layer import GatedStateAttention
from keras_efficient_attn.layers.attention.registry import register_attention
from keras_efficient_attn.ops.common.checks import is_number


@register_attention("retention")
@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class RetentionAttention(GatedStateAttention):
    """Retention: linear attention whose state decays at a fixed rate per head.

    ```
    S[t]    = γ S[t − 1] + k[t]ᵀ v[t]
    head[t] = norm(q[t] S[t] / √key_dim) ⊙ swish(W x[t])
    ```

    with rotary positions in `q` and `k`, `γ = 1 − 2^(−5 − h)` for head `h`, and the
    norm of each head's outputs. Query `t` sees keys `0..t`: a call needs
    `use_causal_mask=True`. A masked key neither decays the state nor writes to it. Time
    is linear in the length; the state has constant size.

    Args:
        *args: The arguments of `keras.layers.MultiHeadAttention`, by position or
            name: `num_heads`, `key_dim`, `value_dim`, `dropout` (on the heads before
            the norm), `use_bias`, ….
        decays: The `γ`, numbers above 0 and up to 1, one per head. Defaults to `None`:
            the formula's.
        rotary_wavelength: Longest wavelength of the rotary positions. Defaults to
            10,000; `None` for no positions.
        feature_map: A map of `LinearAttention` without log scales, for queries and
            keys. Defaults to `"identity"`.
        normalize: Whether to divide by the sum of the weights instead of `√key_dim`.
            Needs a positive map. Defaults to `False`.
        convolution: Positions that a depthwise causal convolution of projected
            queries, keys and values reaches. Defaults to `None`: no convolution.
        activation: Name of an activation of queries, keys and values, after the
            convolution, or a function. Defaults to `None`.
        qk_activation: Activation of queries and keys in its place; `activation` is then
            the values'. `"linear"` for none. Defaults to `None`: `activation`.
        output_norm: Norm of each head's output, with a learned gain: `"group"` (the
            default), mean 0 and variance 1; `"rms"`, mean square 1; `None` for none; or
            `OutputNorm`.
        output_gate: Activation of the gate that multiplies the heads, a projection of
            the query input. Defaults to `"silu"`; `None` for no gate. Or `OutputGate`.
        num_value_heads: Heads of values, states, decays and outputs: a multiple
            of `num_heads`, which is then that of queries and keys: each serves
            `num_value_heads / num_heads` heads of values, one after the other.
            `layer.num_heads` counts the heads of values. Defaults to `None`:
            `num_heads`. Excludes `num_key_value_heads`.
        **kwargs: Further arguments of `LinearAttention` (`qk_norm`, `temperature`,
            `chunk_size`) and of `EfficientAttention`; no `window`.

    Call arguments:
        As `EfficientAttention`: `query` `(batch, query_length, query_dim)`, `value`
        and `key` `(batch, key_length, …)`.

    Returns:
        `output` `(batch, query_length, output_dim)`; `(output, scores)` with
        `return_attention_scores`, the weights before norm and gate; `(output, state)`
        with `state`.

    Raises:
        ValueError: If an argument named above is invalid.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import RetentionAttention
    >>> layer = RetentionAttention(num_heads=2, key_dim=16, decays=[0.9, 0.99])
    >>> x = keras.random.normal((2, 100, 64))
    >>> y, weights = layer(x, x, use_causal_mask=True, return_attention_scores=True)
    >>> weights.shape  # Zero for later keys.
    (2, 2, 100, 100)

    Reference:
        - [Sun et al., 2023](https://arxiv.org/abs/2307.08621)
    """

    def __init__(
        self,
        *args,
        decays=None,
        rotary_wavelength: float | None = 10_000.0,
        output_norm="group",
        output_gate="silu",
        **kwargs,
    ):
        super().__init__(
            *args,
            rotary_wavelength=rotary_wavelength,
            output_norm=output_norm,
            output_gate=output_gate,
            **kwargs,
        )
        if decays is not None:
            if not isinstance(decays, list | tuple) or not all(
                is_number(decay) and 0 < decay <= 1 for decay in decays
            ):
                raise ValueError(
                    "`decays` must be numbers above 0 and up to 1. Received: "
                    f"decays={decays!r}"
                )
            if len(decays) != self._num_heads:
                raise ValueError(
                    "`decays` must have one number per head. Received: "
                    f"decays={decays!r}, num_heads={self._num_heads}"
                )
            decays = tuple(decays)
        self.keep(dict(decays=decays))

    def _rates(self, key):
        if self.decays is None:
            logs = [math.log1p(-(2.0 ** (-5 - h))) for h in range(self._num_heads)]
        else:
            logs = [math.log(decay) for decay in self.decays]
        return ops.convert_to_tensor(logs, self.state_dtype), None
