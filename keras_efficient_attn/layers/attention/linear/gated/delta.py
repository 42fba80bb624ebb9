"""DeltaAttention and its gated forms: the delta rule corrects the state."""

import keras
from keras import ops

from keras_efficient_attn.layers.attention.linear.gated.layer import (
    GATE_DEVIATION,
    GatedStateAttention,
    apply_projections,
    build_projection,
    check_least_log_decay,
    decay_name,
    log_rates,
    step_biases,
)
from keras_efficient_attn.layers.attention.registry import register_attention
from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.checks import (
    check_bool,
    check_positive_int,
    is_number,
)
from keras_efficient_attn.ops.common.numerics import accumulator_dtype


@register_attention("delta")
@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class DeltaAttention(GatedStateAttention):
    """The delta rule: a value replaces what the state held under its key.

    ```
    β[t]    = max_beta · sigmoid(W x[t])
    S[t]    = S[t − 1] + β[t] k[t]ᵀ (v[t] − k[t] S[t − 1])
    head[t] = norm(q[t] S[t] / √key_dim)
    ```

    with `q`, `k` and `v` after a short convolution and SiLU, and `q` and `k` of norm
    1. Query `t` sees keys `0..t`: a call needs `use_causal_mask=True`. A masked key
    does not write. Time is linear in the length; the state has constant size.

    Args:
        *args: The arguments of `keras.layers.MultiHeadAttention`, by position or
            name: `num_heads`, `key_dim`, `value_dim`, `dropout` (on the heads before
            the norm), `use_bias`, ….
        max_beta: The largest β, above 0 and up to 2. Above 1, the state can change sign
            along a key. Defaults to 1.
        use_beta: Whether β is learned. Otherwise it is `max_beta`. Defaults to `True`.
        rotary_wavelength: Longest wavelength of rotary positions. Defaults to `None`:
            no positions.
        feature_map: A map of `LinearAttention` without log scales, for queries and
            keys. Defaults to `"unit"`; with keys longer than 1 the state may grow
            without bound.
        convolution: Positions that a depthwise causal convolution of projected
            queries, keys and values reaches. Defaults to 4; `None` for no convolution.
        activation: Name of an activation of queries, keys and values, after the
            convolution, or a function. Defaults to `"silu"`; `None` for none.
        qk_activation: Activation of queries and keys in its place; `activation` is then
            the values'. `"linear"` for none. Defaults to `None`: `activation`.
        output_norm: Norm of each head's output, with a learned gain: `"rms"` (the
            default), mean square 1; `"group"`, mean 0 and variance 1; `None` for none;
            or `OutputNorm`.
        output_gate: Activation of a gate that multiplies the heads, a projection of
            the query input, or `OutputGate`. Defaults to `None`: no gate.
        num_value_heads: Heads of values, states, β and outputs: a multiple
            of `num_heads`, which is then that of queries and keys: each serves
            `num_value_heads / num_heads` heads of values, one after the other.
            `layer.num_heads` counts the heads of values. Defaults to `None`:
            `num_heads`. Excludes `num_key_value_heads`.
        **kwargs: Further arguments of `LinearAttention` (`normalize`, `qk_norm`,
            `temperature`, `chunk_size`) and of `EfficientAttention`; no `window`.

    Call arguments:
        As `EfficientAttention`: `query` `(batch, query_length, query_dim)`, `value`
        and `key` `(batch, key_length, …)`. β is a projection of `key`.

    Returns:
        `output` `(batch, query_length, output_dim)`; `(output, scores)` with
        `return_attention_scores`, the weights of the values before norm and gate;
        `(output, state)` with `state`.

    Raises:
        ValueError: If an argument named above is invalid.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import DeltaAttention
    >>> layer = DeltaAttention(num_heads=4, key_dim=16)
    >>> state = layer.get_initial_state(batch_size=2)
    >>> token = keras.random.normal((2, 1, 64))
    >>> y, state = layer(token, token, use_causal_mask=True, state=state)
    >>> state["key_inputs"].shape  # The next convolutions read 3 projected keys.
    (2, 3, 4, 16)

    Reference:
        - [Yang et al., 2024](https://arxiv.org/abs/2406.06484)
        - [Grazzi et al., 2024](https://arxiv.org/abs/2411.12537), for β up to 2
    """

    def __init__(
        self,
        *args,
        max_beta: float = 1.0,
        use_beta: bool = True,
        feature_map="unit",
        convolution: int | None = 4,
        activation="silu",
        **kwargs,
    ):
        super().__init__(
            *args,
            feature_map=feature_map,
            convolution=convolution,
            activation=activation,
            **kwargs,
        )
        if not is_number(max_beta) or not 0 < max_beta <= 2:
            raise ValueError(
                "`max_beta` must be a number above 0 and up to 2. Received: "
                f"max_beta={max_beta!r}"
            )
        check_bool("use_beta", use_beta)
        self.keep(dict(max_beta=max_beta, use_beta=use_beta))

    def _build_rates(self, input_dim):
        heads = self._key_value_heads
        if self.use_beta:
            self._beta_layers = build_projection(
                self, "beta", input_dim, (heads,), deviation=GATE_DEVIATION
            )

    def _rates(self, key):
        log_decay = self._log_decay(key)
        if self.use_beta:
            logits = apply_projections(self._beta_layers, key)
            logits = ops.cast(logits, accumulator_dtype(logits))
            beta = self.max_beta * ops.sigmoid(logits)
        else:
            shape = (*shape_of(key)[:2], self._key_value_heads)
            beta = ops.full(shape, self.max_beta, self.state_dtype)
        if self.num_key_value_heads is not None:
            beta = self._for_query_heads(beta)
            if log_decay is not None:
                log_decay = self._for_query_heads(log_decay)
        return log_decay, beta

    def _log_decay(self, key):
        """The decays of the key inputs, of the keys' heads, or `None`."""
        return None

    def operations(self, length, causal):
        # A third product with the state, the read at the key.
        read = 2 * self._num_heads * self._feature_dim * self._value_dim
        return super().operations(length, causal) + read * length


class DecayingDeltaAttention(DeltaAttention):
    """`DeltaAttention` with decays `−exp(A) softplus(W x + b)`, A of each head.

    At first `exp(A)` is uniform from `least_rate` to 16, and `softplus(b)` uniform in
    the logarithm from 0.001 to 0.1, as the authors of each rule have them.
    """

    least_rate = 1.0
    least_log_decay = None

    def _build_decays(self, input_dim, shape, rank=None):
        """Creates W, A and b.

        Args:
            input_dim: Width of the inputs.
            shape: Of the decays at a position: `(heads,)` or `(heads, features)`.
            rank: Rank of W; `None` for full rank.
        """
        self._decay_layers = build_projection(
            self, decay_name(shape), input_dim, shape, rank, GATE_DEVIATION
        )
        self._log_rate = self.add_weight(
            name="log_rate",
            shape=(shape[0], *(1 for _ in shape[1:])),
            initializer=log_rates(self.least_rate, self._seed_of(3)),
        )
        self._decay_bias = self.add_weight(
            name="decay_bias",
            shape=shape,
            initializer=step_biases(self._seed_of(4)),
        )

    def _log_decay(self, key):
        logits = apply_projections(self._decay_layers, key)
        logits = ops.cast(logits, accumulator_dtype(logits))
        logits = logits + ops.cast(self._decay_bias, logits.dtype)
        rate = ops.exp(ops.cast(self._log_rate, logits.dtype))
        if self.least_log_decay is not None:
            return self.least_log_decay * ops.sigmoid(rate * logits)
        return -rate * ops.softplus(logits)


@register_attention("gated-delta")
@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class GatedDeltaAttention(DecayingDeltaAttention):
    """The gated delta rule: the state decays, then values correct it.

    ```
    α[t]    = exp(−exp(A) softplus(W x[t] + b))
    β[t]    = max_beta · sigmoid(W' x[t])
    S'      = α[t] S[t − 1]
    S[t]    = S' + β[t] k[t]ᵀ (v[t] − k[t] S')
    head[t] = norm(q[t] S[t] / √key_dim) ⊙ swish(W'' x[t])
    ```

    with `q`, `k` and `v` after a short convolution and SiLU, and `q` and `k` of norm
    1; A, α and β are of each head. Query `t` sees keys `0..t`: a call needs
    `use_causal_mask=True`. A masked key neither decays the state nor writes to it. Time
    is linear in the length; the state has constant size.

    Args:
        *args, **kwargs: The arguments of `DeltaAttention`, with its defaults.
        output_gate: Activation of the gate that multiplies the heads, a projection of
            the query input. Defaults to `"silu"`; `None` for no gate. Or `OutputGate`.

    Call arguments:
        As `DeltaAttention`. α and β are projections of `key`.

    Returns:
        As `DeltaAttention`.

    Raises:
        ValueError: If an argument is invalid.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import GatedDeltaAttention
    >>> layer = GatedDeltaAttention(num_heads=4, key_dim=16, max_beta=2.0)
    >>> x = keras.random.normal((2, 100, 64))
    >>> layer(x, x, use_causal_mask=True).shape
    (2, 100, 64)

    Reference:
        - [Yang et al., 2024](https://arxiv.org/abs/2412.06464)
    """

    # The paper's code has 0, which has no logarithm.
    least_rate = 1e-4

    def __init__(self, *args, output_gate="silu", **kwargs):
        super().__init__(*args, output_gate=output_gate, **kwargs)

    def _build_rates(self, input_dim):
        super()._build_rates(input_dim)
        self._build_decays(input_dim, (self._key_value_heads,))


@register_attention("kimi-delta")
@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class KimiDeltaAttention(DecayingDeltaAttention):
    """Kimi Delta Attention: the gated delta rule with a decay per feature of the keys.

    ```
    α[t]    = exp(−exp(A) softplus(W₂ W₁ x[t] + b))
    β[t]    = max_beta · sigmoid(W' x[t])
    S'      = diag(α[t]) S[t − 1]
    S[t]    = S' + β[t] k[t]ᵀ (v[t] − k[t] S')
    head[t] = norm(q[t] S[t] / √key_dim) ⊙ sigmoid(W₄ W₃ x[t])
    ```

    with `q`, `k` and `v` after a short convolution and SiLU, and `q` and `k` of norm
    1; A and β are of each head. Query `t` sees keys `0..t`: a call needs
    `use_causal_mask=True`. A masked key neither decays the state nor writes to it. Time
    is linear in the length; the state has constant size.

    Args:
        *args, **kwargs: The arguments of `DeltaAttention`, with its defaults.
        decay_rank: Rank of `W₂ W₁`. Defaults to `None`: `key_dim`.
        least_log_decay: A number below 0, such as -5, for decays `α[t] =
            exp(least_log_decay · sigmoid(exp(A) (W₂ W₁ x[t] + b)))`, which it bounds.
            Defaults to `None`: the formula above.
        output_gate: Activation of the gate that multiplies the heads, a projection of
            the query input. Defaults to `"sigmoid"`; `None` for no gate. Or
            `OutputGate`, whose rank is `value_dim` by default here.

    Call arguments:
        As `DeltaAttention`. α and β are projections of `key`.

    Returns:
        As `DeltaAttention`.

    Raises:
        ValueError: If an argument is invalid.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import KimiDeltaAttention
    >>> layer = KimiDeltaAttention(num_heads=4, key_dim=16, value_dim=32)
    >>> x = keras.random.normal((2, 100, 64))
    >>> mask = keras.ops.array([[True] * 100, [True] * 60 + [False] * 40])
    >>> layer(x, x, key_mask=mask, use_causal_mask=True).shape
    (2, 100, 64)

    Reference:
        - [Kimi Team, 2025](https://arxiv.org/abs/2510.26692)
    """

    def __init__(
        self,
        *args,
        decay_rank: int | None = None,
        least_log_decay: float | None = None,
        output_gate="sigmoid",
        **kwargs,
    ):
        super().__init__(*args, output_gate=output_gate, **kwargs)
        check_positive_int("decay_rank", decay_rank, optional=True)
        check_least_log_decay(least_log_decay)
        self.keep(dict(decay_rank=decay_rank, least_log_decay=least_log_decay))

    @property
    def _gate_rank(self):
        return super()._gate_rank or self._value_dim

    def _build_rates(self, input_dim):
        super()._build_rates(input_dim)
        rank = self.decay_rank or self._key_dim
        self._build_decays(input_dim, (self._key_value_heads, self.feature_dim), rank)
