"""SparseAttention: the factorised patterns of Sparse Transformers."""

import keras

from keras_efficient_attn.layers.attention.patterns import PatternAttention
from keras_efficient_attn.layers.attention.registry import register_attention
from keras_efficient_attn.ops.common.checks import is_int
from keras_efficient_attn.ops.sparse_attention.api import (
    FORMS,
    sparse_attention_spec,
)
from keras_efficient_attn.ops.sparse_attention.config import SparseConfig, sparse_pairs

STRIDE = 128


@register_attention("sparse")
@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class SparseAttention(PatternAttention):
    """Softmax attention over a strided or a fixed sparse pattern.

    A pattern has two factors. With `l` for `stride` and `c` for `summary`, query `t`
    sees key `s` (and only `s ≤ t` with `use_causal_mask`) if

    ```
    strided  factor 0:  |t - s| ≤ l           factor 1:  (t - s) mod l = 0
    fixed    factor 0:  ⌊t / l⌋ = ⌊s / l⌋     factor 1:  s is among c positions of
                                                         its block of l
    ```

    Two layers, one per factor, connect every position to every earlier one. Time and
    memory grow as `length · (l + length / l)` for the strided and `length · (l + c ·
    length / l)` for the fixed pattern; with `l ≈ √length`, as `length^1.5`. Only blocks
    that the pattern touches are computed.

    Factor 0 of the strided pattern has `l + 1` keys, including the query's own, as
    printed in the paper; in the merged pattern `l` keys would be equivalent.

    Args:
        *args: The arguments of `keras.layers.MultiHeadAttention`, by position or
            name: `num_heads`, `key_dim`, `value_dim`, `dropout` (on the normalised
            weights), `use_bias`, ….
        pattern: `"strided"` (the default), for data with the period `stride`, such as
            the rows of an image, or `"fixed"`, for data without a period, such as text.
        stride: Distance between keys of the second factor, or the length of a block.
            Defaults to 128; about the square root of the length is fastest.
        summary: Positions of a block that all queries see in the fixed pattern, such
            as 8 to 32. Each head has its own positions, assigned from the block's end
            to its start. Defaults to `stride / 16`, at least 1, for the fixed pattern
            with a second factor; 1 otherwise.
        factors: The paper's three ways to use the factors. `"merged"` (the default):
            every head sees both factors; a key in both counts once. `"split"`: the
            first half of the heads has factor 0, the others have factor 1. `0` or `1`:
            all heads have that factor, for layers that alternate: `factors=i % 2` in
            layer `i`.
        rotary_wavelength: Longest wavelength of rotary positions, over 2π, such as
            10,000. Defaults to `None`: no positions.
        **kwargs: Further arguments of `keras.layers.MultiHeadAttention`.

    Call arguments:
        As `EfficientAttention`: `query`, `value`, `key`, masks, `training`,
        `use_causal_mask`, `return_attention_scores`, `state`, `document_ids`. Queries
        and keys may differ in length: position `s` means the same in both.

    Returns:
        As `EfficientAttention`: `(batch, query_length, output_dim)`, with the scores or
        the new state on request.

    Raises:
        ValueError: For arguments that define no pattern.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import SparseAttention
    >>> x = keras.random.normal((2, 1000, 64))
    >>> layer = SparseAttention(num_heads=4, key_dim=16, pattern="fixed", stride=32)
    >>> output = layer(x, x, use_causal_mask=True)

    Alternating layers, by name:

    >>> from keras_efficient_attn.layers import get_attention
    >>> names = ["sparse:stride=32,factors=0", "sparse:stride=32,factors=1"]
    >>> layers = [get_attention(name, num_heads=4, key_dim=16) for name in names]

    Reference:
        - [Child et al., 2019](https://arxiv.org/abs/1904.10509)
    """

    state_grows = True

    def __init__(
        self,
        *args,
        pattern: str = "strided",
        stride=STRIDE,
        summary: int | None = None,
        factors: str | int = "merged",
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.keep(locals())
        # The pattern checks its own arguments.
        self._pattern = SparseConfig(
            **self.pattern_arguments, num_heads=self._num_heads
        )

    @property
    def pattern_arguments(self):
        """The arguments of `ops.sparse_attention` and `ops.sparse_pattern`."""
        summary = self.summary
        if summary is None:
            summarised = self.pattern == "fixed" and self.factors != 0
            known = is_int(self.stride)
            summary = max(1, self.stride // 16) if summarised and known else 1
        return dict(
            pattern=self.pattern,
            stride=self.stride,
            summary=summary,
            factors=self.factors,
        )

    def state_spec(self, batch_size, max_length):
        # Per token, the strided pattern reads `stride + max_length / stride` keys and
        # the fixed pattern `stride + summary · max_length / stride`.
        sizes = (batch_size, max_length, self._key_dim, self._value_dim)
        return sparse_attention_spec(self._pattern, *sizes, self.state_dtype)

    def operations(self, length, causal):
        pairs = sparse_pairs(length, causal, self._pattern)
        return 2 * (self._key_dim + self._value_dim) * pairs

    def attend_to_pattern(self, softmax, call):
        return softmax.attend(self._pattern, FORMS)
