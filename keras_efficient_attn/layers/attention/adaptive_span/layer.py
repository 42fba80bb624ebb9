"""AdaptiveSpan: attention with a learned span per head."""

import dataclasses
import functools
import math

import keras
from keras import ops

from keras_efficient_attn.layers.attention.patterns import PatternAttention
from keras_efficient_attn.layers.attention.registry import register_attention
from keras_efficient_attn.ops.adaptive_span.api import FORMS
from keras_efficient_attn.ops.adaptive_span.bands import RAMP, SpanConfig
from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.checks import (
    check_bool,
    check_positive_int,
    check_positive_number,
    check_weight,
    is_number,
    is_positive_int,
)
from keras_efficient_attn.ops.common.dense_softmax import count_pairs
from keras_efficient_attn.ops.common.numerics import (
    max_along,
    mean_of_channels,
    wide_dtype,
)
from keras_efficient_attn.ops.common.state import recent_keys_spec
from keras_efficient_attn.ops.reversible.remembered import is_replay

MAX_SPAN = 1024
# The paper's small model, with the same maximal span.
PENALTY = 2e-6
# A trimmed window is a multiple of this and has this many spare keys.
TRIM_UNIT = 64
# Factor of the largest dynamic span seen so far, per training call.
DECAY = 0.99
# The smallest initial bias of a dynamic span: σ never reaches 0.
LEAST_LOGIT = -4.0


# Checked once: equal windows are one object. `torch.compile` traces cached functions,
# but no cached class.
@functools.lru_cache(256)
def _span_config(*arguments):
    return SpanConfig(*arguments)


@register_attention("adaptive-span")
@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class AdaptiveSpan(PatternAttention):
    """Softmax attention with a learned span per head; cost follows the span.

    A soft mask over distances multiplies the weights. It falls from 1 to 0 beyond the
    head's span `z`, so that `z` has a gradient:

    ```
    m(x) = min(max((ramp + z − x) / ramp, 0), 1)
    w[t, s] = m(|t − s|) exp(q[t]·k[s] / √key_dim)
    head[t] = Σ_s w[t, s] v[s] / Σ_s w[t, s]
    ```

    A penalty in the loss keeps spans as short as is useful.

    The layer computes a band: each query by the `window` keys next to it. `window` is
    `max_span` at first; `trim` cuts it to the keys that the heads use, which saves time
    and memory. `keras_efficient_attn.layers.TrimSpans` does so during training. Outputs
    stay the same, and spans can grow into the spare keys.

    Args:
        *args: The arguments of `keras.layers.MultiHeadAttention`, by position or
            name: `num_heads`, `key_dim`, `value_dim`, `dropout` (on the normalised
            weights), `use_bias`, ….
        max_span: Positive integer: the longest span, in positions. A query sees
            itself and at most `max_span - 1` earlier keys and, if not causal, as many
            later ones. Defaults to 1,024.
        ramp: Positive number: positions over which the mask falls to 0. A head sees at
            least this many. Defaults to 32.
        include_self: Whether a query sees its own position. With `False`, as in the
            paper, a query sees earlier positions only (and, if not causal, later ones),
            and a query that sees none gets zeros. Defaults to `True`.
        initial_span: Number of positions from 0 to `max_span`. A dynamic span starts
            between `max_span · σ(-4)` and `max_span · σ(4)`. Defaults to 0.
        penalty: Number of at least 0. In training the loss includes `penalty · z`,
            averaged over heads and, for dynamic spans, over the positions that a
            `query_mask` keeps; not if the layer is not trainable. The paper uses 2e-6
            for spans of 1,024 and 5e-7 for spans of 8,192. Defaults to 2e-6.
        dynamic: Whether the span also depends on the query's input, `z[t] = max_span ·
            σ(v·x[t] + b)` with v and b per head. Defaults to `False`.
        relative_positions: `True`: logits have a learned term for the distance,
            `q[t]·p[|t − s|] / √key_dim`, with a table of `max_span` vectors that the
            heads share. `"shared"`: in a `TransformerStack`, one table for all its
            layers, as in the paper. Defaults to `False`.
        window: Positive integer up to `max_span`: keys to compute, until the next
            `trim`. Defaults to `max_span`.
        rotary_wavelength: Longest wavelength of rotary positions, over 2π, such as
            10,000. Defaults to `None`: none.
        **kwargs: Further arguments of `keras.layers.MultiHeadAttention`.

    Call arguments:
        As `EfficientAttention`: `query`, `value`, `key`, masks, `training`,
        `use_causal_mask`, `return_attention_scores`, `state`, `document_ids`. A state
        stays valid after a `trim`.

    Returns:
        As `EfficientAttention`.

    Raises:
        ValueError: If an argument is invalid.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import AdaptiveSpan
    >>> layer = AdaptiveSpan(num_heads=4, key_dim=16, max_span=512, initial_span=20)
    >>> x = keras.random.normal((2, 1000, 64))
    >>> layer(x, x, use_causal_mask=True).shape
    (2, 1000, 64)
    >>> layer.trim()  # 20 + 32 positions, rounded up to 64, and 64 to spare
    128
    >>> layer.spans()
    array([20., 20., 20., 20.], dtype=float32)

    Reference:
        - [Sukhbaatar et al., 2019](https://arxiv.org/abs/1905.07799)
    """

    # `trim` may change the window while a sequence is read.
    _takes_any_state_length = True

    def __init__(
        self,
        *args,
        max_span: int = MAX_SPAN,
        ramp: float = RAMP,
        include_self: bool = True,
        initial_span: float = 0,
        penalty: float = PENALTY,
        dynamic: bool = False,
        relative_positions: bool | str = False,
        window: int | None = None,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        window = max_span if window is None else window
        self.keep(locals())
        self._check_arguments()
        self._position_keys = None

    def build(self, query_shape, value_shape, key_shape=None):
        super().build(query_shape, value_shape, key_shape)
        if self.relative_positions:
            if self._position_keys is None:
                self._make_position_keys()
            if not self._position_keys.built:
                self._position_keys.build()
        heads = (self._num_heads,)

        def weight(name, shape, initial, **options):
            # Half precision cannot tell far positions apart.
            return self.add_weight(
                name=name,
                shape=shape,
                initializer=keras.initializers.Constant(initial),
                dtype=wide_dtype(self.variable_dtype),
                **options,
            )

        share = self.initial_span / self.max_span
        if not self.dynamic:
            self._span = weight("span", heads, share, constraint=UnitInterval())
            return
        logit = -LEAST_LOGIT
        if share < 1:
            logit = LEAST_LOGIT if share == 0 else math.log(share / (1 - share))
            logit = min(max(logit, LEAST_LOGIT), -LEAST_LOGIT)
        self._span_kernel = weight("span_kernel", (query_shape[-1], *heads), 0.0)
        self._span_bias = weight("span_bias", heads, logit)
        seen = dict(trainable=False, aggregation="only_first_replica")
        self._mean_span = weight(
            "mean_span", heads, self.max_span / (1 + math.exp(-logit)), **seen
        )
        # The spans that inputs need are not known yet.
        self._largest_span = weight("largest_span", heads, self.max_span, **seen)

    def state_spec(self, batch_size, max_length):
        reach = self.window - 1
        sizes = (batch_size, reach, self._num_heads, self._key_dim, self._value_dim)
        return recent_keys_spec(*sizes, self.state_dtype)

    def operations(self, length, causal):
        terms = 2 if self.relative_positions else 1
        per_pair = 2 * self._num_heads * (terms * self._key_dim + self._value_dim)
        return per_pair * count_pairs(min(self.window, length), length, causal)

    @property
    def is_softmax(self):
        return super().is_softmax and not self.relative_positions

    @property
    def shares_with_blocks(self):
        return self.relative_positions == "shared"

    def spans(self):
        """The span of each head in positions, a NumPy array `(heads,)`.

        Excludes the ramp. For dynamic spans, the mean over the positions of the last
        training call of the trainable layer.
        """
        self._check_built("spans")
        if self.dynamic:
            return ops.convert_to_numpy(self._mean_span)
        return ops.convert_to_numpy(self._span) * self.max_span

    def trim(self):
        """Sets the computed window to the keys in use.

        The window becomes the largest span of a head plus its ramp, rounded up to 64,
        plus 64 that spans can grow into, and at most `max_span`. A larger span is cut
        off at the window until the next `trim`. For dynamic spans, the largest span
        over training calls counts; it starts at `max_span` and decays by 1 % per call.

        Functions that are already compiled keep their window:
        `keras_efficient_attn.layers.trim_spans` trims a model's layers and makes the
        model compile again.

        Returns:
            The window, in keys.
        """
        self._check_built("trim")
        largest = self.spans()
        if self.dynamic:
            largest = ops.convert_to_numpy(self._largest_span)
        used = float(largest.max()) + self.ramp
        rounded = TRIM_UNIT * math.ceil(used / TRIM_UNIT)
        self.window = min(self.max_span, rounded + TRIM_UNIT)
        return self.window

    def share_weights_with(self, other):
        """Shares another layer's table of `relative_positions`.

        Args:
            other: An `AdaptiveSpan` with `relative_positions`, of the same `max_span`
                and `key_dim`. This layer must not be built yet.

        Raises:
            ValueError: If this layer is built, or the two differ.
        """
        mine, theirs = (
            (layer.relative_positions, layer.max_span, layer._key_dim)
            for layer in (self, other)
        )
        if not mine[0] or mine != theirs or self.built:
            raise ValueError(
                "`share_weights_with()` needs a layer that is not built, and two "
                "layers of the same `relative_positions`, `max_span` and `key_dim`. "
                f"Received: {mine} and {theirs}, built={self.built}"
            )
        if other._position_keys is None:
            other._make_position_keys()
        self._position_keys = other._position_keys
        self.shares_unsaved = True

    def attend_to_pattern(self, softmax, call):
        position_key = None
        if self._position_keys is not None:
            position_key = ops.convert_to_tensor(self._position_keys.table)
            position_key = position_key[: self.window]
        config = _span_config(self.window, self.ramp, self.include_self)
        return softmax.attend(config, FORMS, call.options["spans"], position_key)

    @property
    def _learns(self):
        return self.trainable and (self.dynamic or bool(self.penalty))

    def _prepare_inputs(self, query, value, key, call):
        spans = self._spans(query, call.query_mask)
        # A batch without rows has no spans to learn from.
        learns = call.training and self._learns and not is_replay()
        if learns and query.shape[0] != 0:
            self._learn_from(spans, call.query_mask)
        return query, value, key, dataclasses.replace(call, options={"spans": spans})

    def _spans(self, query, query_mask):
        """`(heads,)`, or `(batch, query_length, heads)`, in positions."""
        if not self.dynamic:
            return self.max_span * ops.convert_to_tensor(self._span)
        query = ops.cast(query, self._span_kernel.dtype)
        if query_mask is not None:
            query = ops.where(query_mask[..., None], query, ops.zeros_like(query))
        logits = query @ ops.convert_to_tensor(self._span_kernel)
        return self.max_span * ops.sigmoid(logits + self._span_bias)

    def _learn_from(self, spans, query_mask):
        """Adds the penalty and records the mean and the largest of dynamic spans."""
        if self.dynamic:
            if query_mask is None:
                weights = ops.ones(shape_of(spans)[:2], spans.dtype)
            else:
                weights = ops.cast(query_mask, spans.dtype)
            # An input that overflowed has no span to learn from.
            finite = ops.isfinite(spans)
            spans = ops.where(finite, spans, ops.zeros_like(spans))
            weights = weights[..., None] * ops.cast(finite, spans.dtype)
            number = ops.sum(weights, axis=(0, 1))
            seen = number > 0
            mean_spans = ops.sum(spans * weights, axis=(0, 1)) / ops.where(
                seen, number, 1.0
            )
            before = ops.convert_to_tensor(self._mean_span)
            self._mean_span.assign(
                ops.where(seen, ops.stop_gradient(mean_spans), before)
            )
            largest = ops.stop_gradient(max_along(spans * weights, axis=(0, 1)))
            remembered = DECAY * ops.convert_to_tensor(self._largest_span)
            larger = ops.where(largest > remembered, largest, remembered)
            self._largest_span.assign(larger)
        else:
            mean_spans = spans
        if self.penalty:
            self.add_loss(self.penalty * mean_of_channels(mean_spans)[0])

    def _make_position_keys(self):
        self._position_keys = PositionKeys(
            self.max_span, self._key_dim, dtype=self.dtype_policy, name="position_keys"
        )

    def _check_built(self, method):
        if not self.built:
            raise ValueError(
                f"`{method}()` needs a built layer, whose spans exist. Received: "
                "built=False"
            )

    def _check_arguments(self):
        check_positive_int("max_span", self.max_span)
        if not is_positive_int(self.window) or self.window > self.max_span:
            raise ValueError(
                f"`window` must be a positive integer up to `max_span` "
                f"({self.max_span}), or None. Received: window={self.window!r}"
            )
        check_positive_number("ramp", self.ramp)
        check_weight("penalty", self.penalty)
        initial = self.initial_span
        if not is_number(initial) or not 0 <= initial <= self.max_span:
            raise ValueError(
                f"`initial_span` must be a number from 0 to `max_span` "
                f"({self.max_span}). Received: initial_span={initial!r}"
            )
        check_bool("include_self", self.include_self)
        check_bool("dynamic", self.dynamic)
        if self.relative_positions != "shared":
            check_bool("relative_positions", self.relative_positions)


class PositionKeys(keras.layers.Layer):
    """A learned vector for each distance.

    Args:
        max_span: Number of distances.
        dim: Width of each vector.
        **kwargs: Arguments of `keras.layers.Layer`.
    """

    def __init__(self, max_span, dim, **kwargs):
        super().__init__(**kwargs)
        self.max_span = max_span
        self.dim = dim

    def build(self, input_shape=None):
        self.table = self.add_weight(
            name="table",
            shape=(self.max_span, self.dim),
            initializer=keras.initializers.RandomNormal(stddev=0.02),
        )


class UnitInterval(keras.constraints.Constraint):
    """Keeps a weight from 0 to 1."""

    def __call__(self, w):
        return ops.clip(w, 0.0, 1.0)
