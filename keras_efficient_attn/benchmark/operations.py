"""Useful operations of a layer: the one place where they are counted.

A multiplication and an addition are two operations. Counted are the matrix products
that the definition needs, for self-attention over `length` positions:

- projections: `8 · dim · width` per position (query, key, value and output), where
  `width` is heads times head size;
- softmax: `4 · width` per pair of a query and a key that it sees; local and sparse
  attention have no more pairs than their patterns;
- linear attention with `m` features per head: `4 · m · width` per position (adding to
  the state and reading it), and `4 · rows · width` where a random projection with that
  many rows makes the features; with a `window`, `4 · width` per exact pair;
- vector quantisation with `c` codes per head: `6 · c · width` per position (finding
  the key's code, weighing and reading the codes), with soft codes `8 · c · width` (a
  value is added to all of them), and `4 · width` per pair in the window, half as much
  again for relative positions. With `order=2` a third of the `6`, reading the codes, is
  multiplied by the number of features, `(rank + 1)(rank + 2) / 2`.
- Fourier attention: `6 · width` per pair: difference, sine, quotient and product a
  dimension of the key, and a value. Its linear form counts as linear attention.
- hashed attention: `2 · width` per rotation and position, and `4 · width` per pair of a
  query and a key of its chunk and the one before, in each round (at most all pairs;
  with causality, half of the own chunk). Queries and keys have one projection.

Not counted is what an implementation adds: products inside chunks, padding,
recomputation. A backward pass counts twice the forward pass.
"""

import keras
import numpy as np

from keras_efficient_attn.layers import (
    FourierAttention,
    LocalAttention,
    PerformerAttention,
    ReformerLSHAttention,
    SoftmaxAttention,
    SparseAttention,
    VQAttention,
)
from keras_efficient_attn.ops.sparse_attention.patterns import (
    head_factors,
    summary_start,
)
from keras_efficient_attn.ops.vq_attention.cache import num_features

BACKWARD = 2


def layer_operations(layer, batch, length, causal):
    """Useful operations of a forward pass, or `None` for a layer without a count.

    Args:
        layer: Built attention layer.
        batch: Rows.
        length: Positions.
        causal: Whether query `t` sees keys `0..t` only.

    Returns:
        Number of operations, or `None`.
    """
    core = _core(layer, length, causal)
    return None if core is None else batch * (length * _projections(layer) + core)


def decode_operations(layer, batch, length):
    """Useful operations of one more position after `length` others, or `None`."""
    before, after = (_core(layer, n, True) for n in (length, length + 1))
    if before is None or after is None:
        return None
    return batch * (_projections(layer) + after - before)


def _projections(layer):
    projections = [layer.query_dense, layer.value_dense, layer.output_dense]
    if layer.key_dense is not layer.query_dense:
        projections.append(layer.key_dense)
    shapes = [projection.kernel.shape for projection in projections]
    return 2 * sum(shape[0] * shape[1] * shape[2] for shape in shapes)


def _core(layer, length, causal):
    """Operations between the projections, for one row."""
    heads, key_dim, value_dim = layer.num_heads, layer.key_dim, layer.value_dim
    config = layer.get_config()
    if config["use_gate"] or config.get("sliding_window") is not None:
        return None
    per_pair = 2 * heads * (key_dim + value_dim)
    if type(layer) in (keras.layers.MultiHeadAttention, SoftmaxAttention):
        return per_pair * _pairs(length, length, causal)
    if isinstance(layer, FourierAttention) and not layer.linear:
        per_pair = 2 * heads * (2 * key_dim + value_dim)
        return per_pair * _pairs(length, length, causal)
    if isinstance(layer, FourierAttention | PerformerAttention):
        features = 4 * heads * key_dim * _projection_rows(layer)
        sums = 4 * heads * value_dim * layer.feature_dim
        window = min(getattr(layer, "window", None) or 0, length)
        return (features + sums) * length + per_pair * _pairs(window, length, causal)
    if isinstance(layer, SparseAttention):
        pattern = layer.pattern_arguments
        pairs = _sparse_pairs(length, causal, heads, **pattern)
        return 2 * (key_dim + value_dim) * pairs
    if isinstance(layer, LocalAttention):
        pairs = _local_pairs(length, causal, **layer.pattern_arguments)
        return None if pairs is None else per_pair * pairs
    if isinstance(layer, ReformerLSHAttention):
        return _hashed_core(layer, length, causal)
    if isinstance(layer, VQAttention):
        window = 0 if layer.window is None else min(layer.window, length)
        if layer.config.relative_positions:
            per_pair += 2 * heads * key_dim
        # Finding the code and weighing it; reading, and for soft codes writing, values.
        through_values = (4 if layer.config.soft else 2) * value_dim
        if layer.config.order == 2:
            through_values *= num_features(layer.config.expanded_dims(key_dim))
        codes = heads * layer.num_codes * (4 * key_dim + through_values)
        return codes * length + per_pair * _pairs(window, length, causal)
    return None


def _sparse_pairs(length, causal, num_heads, pattern, stride, summary, heads):
    """Pairs of the pattern of `SparseAttention`, of all heads together."""
    i = np.arange(length)
    # Of each query: keys of the first factor, of the second, and of both.
    if pattern == "strided":
        counts = np.minimum(i, stride) + 1, i // stride + 1, 1 + (i >= stride)
        if not causal:
            # Symmetric, and the query itself is there once.
            counts = tuple(n + n[::-1] - 1 for n in counts)

        def of_head(number):
            return counts
    else:
        # The last position that can be seen, and the own block up to there.
        last = i if causal else np.minimum(i - i % stride + stride, length) - 1
        own = last % stride + 1
        end = i if causal else np.full(length, length - 1)

        def of_head(number):
            start = summary_start(stride, summary, number)
            both = np.clip(own - start, 0, summary)
            in_last = np.clip(end % stride + 1 - start, 0, summary)
            return own, end // stride * summary + in_last, both

    total = 0
    for near, number in head_factors(heads, num_heads):
        first, second, both = of_head(number or 0)
        has_far = number is not None
        total += near * first.sum() + has_far * second.sum()
        total -= (near and has_far) * both.sum()
    return int(total)


def _local_pairs(length, causal, window, query_block, memory, grid, order):
    """Pairs of the pattern of `LocalAttention`, of one head; `None` if unknown."""
    if window is not None:
        return _pairs(min(window, length), length, causal)
    if grid is None:
        i = np.arange(length)
        start = i - i % query_block
        last = start + query_block - 1 + memory
        last = i if causal else np.minimum(last, length - 1)
        return int((last - np.maximum(start - memory, 0) + 1).sum())
    rows, columns = grid
    if length != rows * columns:
        return None
    (height, width), (above, beside) = query_block, memory
    row, column = np.divmod(np.arange(length), columns)
    top, left = row - row % height, column - column % width
    right = np.minimum(left + width, columns)
    first_row, first = np.maximum(top - above, 0), np.maximum(left - beside, 0)
    across = np.minimum(left + width + beside, columns) - first
    if not causal:
        down = np.minimum(top + height + above, rows) - first_row
        return int((down * across).sum())
    if order == "raster":
        return int(((row - first_row) * across + column - first + 1).sum())
    done = (np.minimum(top + height, rows) - top) * (left - first)
    own = (row - top) * (right - left) + column - left + 1
    return int(((top - first_row) * across + done + own).sum())


def _hashed_core(layer, length, causal):
    dense = layer.dense_length is not None and length <= layer.dense_length
    all_pairs = _pairs(length, length, causal)
    size = layer.bucket_size
    seen = (
        all_pairs
        if dense
        else min(all_pairs, length * (3 if causal else 4) * size // 2)
    )
    hashed = layer.num_heads - layer.num_local_heads
    rounds = 1 if dense else layer.num_hashes
    rotations = 0
    if not dense:
        factors = layer.num_buckets
        rotations = (factors if isinstance(factors, int) else sum(factors)) // 2
    in_rounds = hashed * rounds + layer.num_local_heads
    per_head = 2 * (layer.key_dim + layer.value_dim)
    hashing = 2 * hashed * layer.key_dim * rotations * rounds * length
    return hashing + in_rounds * per_head * seen


def _pairs(window, length, causal):
    """Pairs whose distance is less than `window`, later keys apart if causal."""
    earlier_or_same = window * length - window * (window - 1) // 2
    if causal or window == 0:
        return earlier_or_same
    return 2 * earlier_or_same - length


def _projection_rows(layer):
    for weight in layer.non_trainable_weights:
        if weight.name in ("projection", "frequencies"):
            return weight.shape[0]
    return 0
