"""GatedLinearAttention: linear attention with learned decays."""

import keras
from keras import ops

from keras_efficient_attn.layers.attention.linear.gated.layer import (
    GATE_DEVIATION,
    GatedStateAttention,
    apply_projections,
    build_projection,
    check_least_log_decay,
    decay_name,
)
from keras_efficient_attn.layers.attention.registry import register_attention
from keras_efficient_attn.ops.common.checks import (
    check_positive_int,
    check_positive_number,
)
from keras_efficient_attn.ops.common.numerics import accumulator_dtype, at_least

DECAYS = ("vector", "scalar")


@register_attention("gated-linear")
@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class GatedLinearAttention(GatedStateAttention):
    """Gated linear attention: the input decides how much of the state to keep.

    ```
    g[t]    = log sigmoid(W x[t] + b) / τ
    S[t]    = diag(exp(g[t])) S[t − 1] + k[t]ᵀ v[t]
    head[t] = norm(q[t] S[t] / √key_dim) ⊙ swish(W' x[t])
    ```

    with one decay per feature of `k`, or one per head. Query `t` sees keys `0..t`,
    and a call needs `use_causal_mask=True`. A masked key neither decays the state nor
    writes to it. Time is linear in the length; the state has constant size.

    Args:
        *args: The arguments of `keras.layers.MultiHeadAttention`, by position or
            name: `num_heads`, `key_dim`, `value_dim`, `dropout` (on the heads before
            the norm), `use_bias`, ….
        decay: `"vector"`, a decay per feature (the default), or `"scalar"`, per head.
        decay_rank: Rank of W, or `None` for a full matrix. Defaults to 16.
        decay_temperature: τ. A larger τ decays more slowly. Defaults to 16.
        least_log_decay: Lower bound of `g`, a number below 0. Defaults to `None`: none.
        rotary_wavelength: Longest wavelength of rotary positions. Defaults to `None`:
            no positions.
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
        output_norm: Norm of each head's output, with a learned gain: `"rms"` (the
            default), mean square 1; `"group"`, mean 0 and variance 1; `None` for none;
            or `OutputNorm`.
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
        and `key` `(batch, key_length, …)`. Decays are projections of `key`.

    Returns:
        `output` `(batch, query_length, output_dim)`; `(output, scores)` with
        `return_attention_scores`, the weights before norm and gate; `(output, state)`
        with `state`.

    Raises:
        ValueError: If an argument named above is invalid.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import GatedLinearAttention
    >>> layer = GatedLinearAttention(num_heads=4, key_dim=16, decay="scalar")
    >>> state = layer.get_initial_state(batch_size=2)
    >>> for segment in keras.random.normal((3, 2, 100, 64)):
    ...     y, state = layer(segment, segment, use_causal_mask=True, state=state)
    >>> state["sum"].shape  # The same after any number of segments.
    (2, 4, 16, 16)

    Reference:
        - [Yang et al., 2023](https://arxiv.org/abs/2312.06635)
    """

    def __init__(
        self,
        *args,
        decay: str = "vector",
        decay_rank: int | None = 16,
        decay_temperature: float = 16.0,
        least_log_decay: float | None = None,
        output_gate="silu",
        **kwargs,
    ):
        super().__init__(*args, output_gate=output_gate, **kwargs)
        if decay not in DECAYS:
            raise ValueError(f"`decay` must be one of {DECAYS}. Received: {decay=}")
        check_positive_int("decay_rank", decay_rank, optional=True)
        check_positive_number("decay_temperature", decay_temperature)
        check_least_log_decay(least_log_decay)
        self.keep(locals(), omit=("output_gate",))

    def _build_rates(self, input_dim):
        shape = (self._key_value_heads,)
        if self.decay == "vector":
            shape = (*shape, self.feature_dim)
        self._decay_layers = build_projection(
            self, decay_name(shape), input_dim, shape, self.decay_rank, GATE_DEVIATION
        )
        self._decay_bias = self.add_weight(
            name="decay_bias", shape=shape, initializer="zeros"
        )

    def _rates(self, key):
        logits = apply_projections(self._decay_layers, key)
        logits = ops.cast(logits, accumulator_dtype(logits))
        logits = logits + ops.cast(self._decay_bias, logits.dtype)
        log_decay = ops.log_sigmoid(logits) / self.decay_temperature
        if self.least_log_decay is not None:
            log_decay = at_least(log_decay, self.least_log_decay)
        if self.num_key_value_heads is not None:
            log_decay = self._for_query_heads(log_decay)
        return log_decay, None
