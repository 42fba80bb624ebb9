"""Linear attention with a decay and a correction, over groups of chunks.

A step takes a group of chunks. In a chunk, with `G` the sum of the log decays from its
start up to and including a position, and S the state before the chunk:

```
P[t, s] = Σ_i φ(k[t])_i φ(k[s])_i exp(G[t]_i − G[s]_i)             s < t
T       = (I + diag(β) P)⁻¹ diag(β)
R       = V − (φ(K) ∘ exp(G)) S
Y       = (φ(Q) ∘ exp(G)) S + A T R
S'      = diag(exp(G[end])) S + (Tᵀ (φ(K) ∘ exp(G[end] − G)))ᵀ R
```

where A is as P, with queries for the keys `t`, and `s ≤ t`. Without `β`, T is I and R
is V. Only R and S' are sequential over chunks; all else is one batch of products.

The decays between two positions are summed directly, not as a difference of prefix
sums, which would lose precision after strong decays.
"""

import functools

import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.backend import BACKEND, shape_of
from keras_efficient_attn.ops.common.chunking import (
    by_head,
    by_position,
    chunk_layout,
    lower_triangle,
    pad_to,
)
from keras_efficient_attn.ops.common.documents import ChunkMasks
from keras_efficient_attn.ops.common.numerics import (
    accumulator_dtype,
    cumulative_sum,
    inner_products,
    pad,
    scale_vectors,
    where,
)
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO, divide, reciprocal
from keras_efficient_attn.ops.common.plan import device_kind
from keras_efficient_attn.ops.common.scan import recompute_scan, vector_jacobian_product
from keras_efficient_attn.ops.linear_attention.feature_maps import (
    elu_features,
    unscaled_elu_features,
)

# Axes of `(batch, heads, chunks, …)` for a scan over chunks, and back. PyTorch's `vmap`
# has no `moveaxis`.
CHUNKS_FIRST, HEADS_FIRST = (2, 0, 1, 3, 4), (1, 2, 0, 3, 4)


def chunked_gated_attention(tensors, rates, state, map_weights, config, position):
    """Causal attention over `(batch, length, heads, dim)`.

    Args:
        tensors: `(query, key, value)`, equally long, zero for keys that do not exist;
            with normalized outputs, values have an additional entry 1.
        rates: `(log_decay, beta)`, each `None` or `(batch, length, heads, 1)`; decays
            may have as many entries as features. Zero for keys that do not exist. Or,
            without `position`, a decay `(heads,)` of all positions, which gets no
            gradient; the returned state is then of no use, as it decays in padding.
        state: `(batch, heads, features, value_dim)`.
        map_weights: Tuple of tensors.
        config: `LinearAttentionConfig`.
        position: Positions of each one's document before it, int32 `(batch, length)`;
            or `None`: all, and those of the state.

    Returns:
        `(output, state)`.
    """
    query, key, value = tensors
    length = shape_of(query)[1]
    heads, features, value_dim = state.shape[1:]
    # A matrix row, features and values. The step has several of each, but smaller steps
    # were slower, especially on PyTorch.
    floats = config.chunk_length + features + (value_dim or features)
    log_decay, beta = rates
    fixed = log_decay is not None and len(log_decay.shape) == 1
    if fixed:
        map_weights, log_decay = (*map_weights, log_decay), None
    if log_decay is not None and log_decay.shape[-1] != 1:
        floats += 4 * features
    floats *= heads
    size, chunks, groups = chunk_layout(
        length, config.chunk_length, query.shape[0], floats
    )
    xs = query, key, value, log_decay, beta, position
    given = (x is not None for x in xs[3:])
    xs = tuple(x for x in xs if x is not None)
    if not (isinstance(length, int) and groups * chunks * size == length):
        xs = tuple(pad_to(x, groups * chunks * size) for x in xs)
    step, gradient = _group_step(config, size, fixed, *given)
    (state,), (output,) = recompute_scan(
        step, (state,), xs, map_weights, gradient, num_steps=groups
    )
    return output[:, :length], state


# Bounded: users may create functions.
@functools.lru_cache(256)
def _group_step(config, size, fixed, has_decay, has_beta, by_document):
    """`(step, gradient)` for `recompute_scan`.

    The carry is the state; `x` is `(query, key, value)`, the given rates, and
    `by_document` the position in the document; the constants are the maps' weights and,
    if it is `fixed`, the decay.

    Args:
        config: `LinearAttentionConfig`.
        size: Positions per chunk.
        fixed: Whether the decay is that of all positions, `(heads,)`.
        has_decay, has_beta: Which rates of positions are given.
        by_document: Whether the state begins anew with each document.
    """
    normalized = config.output == "normalized"

    def fixed_decay(consts, dtype):
        """`(1, heads, 1, 1, 1)`."""
        log_decay = ops.cast(ops.stop_gradient(consts[-1]), dtype)
        return ops.reshape(log_decay, (1, -1, 1, 1, 1))

    def share_kept(state, consts):
        """The share of the state that a chunk keeps by a fixed decay."""
        return (ops.exp(size * fixed_decay(consts, state.dtype)[:, :, 0]),)

    def prepare(x, consts, masks=None):
        dtype = accumulator_dtype(*x)
        query, key, value, *rates = (by_head(ops.cast(t, dtype), size) for t in x)
        map_weights = consts[:-1] if fixed else consts
        query, key = map_features(config, query, key, map_weights)
        log_decay = rates.pop(0) if has_decay else None
        if fixed:
            log_decay = fixed_decay(consts, dtype) + ops.zeros((size, 1), dtype)
        lefts = [query, key] if has_beta else [query]
        near = None if masks is None else masks.near
        scores, *overlaps = _decayed_products(lefts, key, log_decay, near)
        far_query, far_key, reader, end = query, key, key, None
        if log_decay is not None:
            alone = has_decay and log_decay.shape[-1] == 1
            scale = scale_vectors if alone else ops.multiply
            factor = ops.exp(running_sums(log_decay))
            far_query = scale(query, factor)
            far_key = scale(key, ops.exp(running_sums(log_decay, after=True)))
            if has_decay:
                end = ops.swapaxes(factor[:, :, :, -1:], -1, -2)
            reader = scale(key, factor) if has_beta else key
        if masks is not None:
            reads, last, goes_on = (
                ops.cast(x, dtype)[..., None]
                for x in (masks.reads, masks.last, masks.goes_on)
            )
            far_query, reader, far_key = (
                far_query * reads,
                reader * reads,
                far_key * last,
            )
            end = ops.ones_like(key[..., :1, :1]) if end is None else end
            end = end * goes_on[..., None]
        if not has_beta:
            return far_query, far_key, value, scores, end
        (beta,), (overlaps,) = rates, overlaps
        overlaps = scale_vectors(ops.tril(overlaps, k=-1), beta)
        return far_query, far_key, value, scores, end, reader, overlaps, beta

    def step(carry, x, consts):
        masks = None
        if by_document:
            x, masks = x[:-1], ChunkMasks.of(x[-1], size)
        kept = share_kept(*carry, consts) if fixed else ()
        chunks = _Chunks(kept, *carry, *prepare(x, consts, masks))
        output = chunks.output()
        if normalized:
            output = divide(output[..., :-1], output[..., -1])
        return (chunks.carry,), (by_position(output),)

    def gradient(carry, x, consts, y, carry_gradient, y_gradient):
        own, prepare_own = x, prepare
        if by_document:
            masks = ChunkMasks.of(x[-1], size)
            own, prepare_own = x[:-1], functools.partial(prepare, masks=masks)
        prepared, pull = vector_jacobian_product(prepare_own, (own, consts))
        kept = share_kept(*carry, consts) if fixed else ()
        chunks = _Chunks(kept, *carry, *prepared)
        grad_output = by_head(y_gradient[0], size)
        if normalized:
            inverse = reciprocal(chunks.output()[..., -1:])
            along = inner_products(grad_output, by_head(y[0], size))
            grad_output = ops.concatenate([grad_output, -along], axis=-1) * inverse
        grad_state, grad_prepared = chunks.gradient(grad_output, *carry_gradient)
        grad_x, grad_consts = pull(grad_prepared)
        # Positions are integers.
        grad_x = *grad_x, *map(ops.zeros_like, x[len(own) :])
        return (grad_state,), grad_x, grad_consts

    return step, gradient


class _Chunks:
    """A group of chunks: states before each chunk, and each chunk's update.

    Attributes:
        scores, far_key: A T and Tᵀ (φ(K) ∘ exp(G[end] − G)) of the formulae.
        before: States before each chunk, `(batch, heads, chunks, features, dim)`.
        rest: R.
        carry: The state after the last chunk.
    """

    def __init__(
        self,
        kept,
        state,
        far_query,
        far_key,
        value,
        scores,
        end,
        reader=None,
        overlaps=None,
        beta=None,
    ):
        self.kept = kept
        self.far_query, self.reader, self.end, self.beta = far_query, reader, end, beta
        self._scores, self._far_key = scores, far_key
        if beta is not None:
            self._inverse = inverse_unit_lower(overlaps)
            self._solved = self._inverse * ops.swapaxes(beta, -1, -2)
            scores = scores @ self._solved
            far_key = ops.swapaxes(self._solved, -1, -2) @ far_key
        self.scores, self.far_key = scores, far_key
        step = _state_step(beta is not None, end is not None)
        tensors = value, far_key, reader, end
        xs = tuple(ops.transpose(x, CHUNKS_FIRST) for x in tensors if x is not None)
        (self.carry,), rows = recompute_scan(step, (state,), xs, kept)
        self.before, *rest = (ops.transpose(row, HEADS_FIRST) for row in rows)
        self.rest = rest[0] if rest else value

    def output(self):
        return self.far_query @ self.before + self.scores @ self.rest

    def gradient(self, grad_output, grad_carry):
        """Gradients of the state and of the chunks' inputs."""
        before = ops.swapaxes(self.before, -1, -2)
        rest = ops.swapaxes(self.rest, -1, -2)
        grad_scores = grad_output @ rest
        grad_far_query = grad_output @ before
        step = _state_gradient_step(self.beta is not None, self.end is not None)
        grad_rest = ops.swapaxes(self.scores, -1, -2) @ grad_output
        grad_before = ops.swapaxes(self.far_query, -1, -2) @ grad_output
        tensors = grad_before, grad_rest, self.far_key, self.reader, self.end
        xs = tuple(ops.transpose(x, CHUNKS_FIRST) for x in tensors if x is not None)
        (grad_state,), rows = recompute_scan(
            step, (grad_carry,), xs, self.kept, reverse=True
        )
        grad_after, *rows = (ops.transpose(row, HEADS_FIRST) for row in rows)
        grad_rest = rows[0] if rows else grad_rest + self.far_key @ grad_after
        grad_far_key = ops.swapaxes(rest, -1, -2) @ ops.swapaxes(grad_after, -1, -2)
        grad_end = None
        if self.end is not None:
            grad_end = inner_products(grad_after, self.before)
            if self.end.shape[-2] == 1:
                grad_end = ops.sum(grad_end, axis=-2, keepdims=True)
        if self.beta is None:
            return grad_state, (
                grad_far_query,
                grad_far_key,
                grad_rest,
                grad_scores,
                grad_end,
            )
        inverse = ops.swapaxes(self._inverse, -1, -2)
        grad_solved = ops.swapaxes(self._scores, -1, -2) @ grad_scores
        grad_solved = grad_solved + self._far_key @ ops.swapaxes(grad_far_key, -1, -2)
        grad_beta = inner_products(
            ops.swapaxes(grad_solved, -1, -2), ops.swapaxes(self._inverse, -1, -2)
        )
        grad_overlaps = grad_solved * ops.swapaxes(self.beta, -1, -2)
        grad_overlaps = inverse @ grad_overlaps @ inverse
        return grad_state, (
            grad_far_query,
            self._solved @ grad_far_key,
            grad_rest,
            grad_scores @ ops.swapaxes(self._solved, -1, -2),
            grad_end,
            -(grad_rest @ before),
            -grad_overlaps,
            grad_beta,
        )


@functools.cache
def _state_step(reads, decays):
    """Maps the state before a chunk to the state after it.

    The only constant, if any, is the share that all chunks keep.
    """

    def step(carry, x, consts):
        (state,), (rest, far_key, *x) = carry, x
        kept = state
        for share in x[-1:] if decays else consts:
            kept = kept * share
        if reads:
            rest = rest - x[0] @ state
        after = kept + ops.swapaxes(far_key, -1, -2) @ rest
        return (after,), (state, rest) if reads else (state,)

    return step


@functools.cache
def _state_gradient_step(reads, decays):
    """Maps the gradient of the state after a chunk to the gradient before it."""

    def step(carry, x, consts):
        (after,), (before, rest, far_key, *x) = carry, x
        y = (after,)
        if reads:
            rest = rest + far_key @ after
            before = before - ops.swapaxes(x[0], -1, -2) @ rest
            y = after, rest
        for share in x[-1:] if decays else consts:
            after = after * share
        return (before + after,), y

    return step


def _decayed_products(lefts, key, log_decay, near):
    """`Σ_i x[t]_i k[s]_i exp(Σ_{s < r ≤ t} g[r]_i)` for `s ≤ t`, and 0 for others.

    No exponential exceeds 1, however strong the decay.

    Args:
        lefts: The `x`, a list of `(..., chunks, length, features)`.
        key: `(..., chunks, length, features)`.
        log_decay: g, `(..., chunks, length, 1)` or `(..., chunks, length, features)`,
            not positive; or `None` for 0.
        near: `ChunkMasks.near`: products of other pairs are 0, too; or `None`.

    Returns:
        A list of `(..., chunks, length, length)`.
    """
    if log_decay is not None and log_decay.shape[-1] != 1:
        products = _products_by_feature(lefts, key, log_decay)
        if near is not None:
            products = [ops.where(near, product, 0.0) for product in products]
        return products
    factors = None
    if log_decay is not None:
        lower = lower_triangle(shape_of(log_decay)[-2]) if near is None else near
        change = ops.where(ops.tril(lower, k=-1), log_decay, 0.0)
        change = running_sums(change)
        factors = ops.exp(where(lower, change, LOG_ZERO))
    products = []
    for x in lefts:
        product = x @ ops.swapaxes(key, -1, -2)
        if factors is not None:
            product = product * factors
        elif near is not None:
            product = ops.where(near, product, 0.0)
        else:
            product = ops.tril(product)
        products.append(product)
    return products


def _products_by_feature(lefts, key, log_decay):
    """The products of decays that differ by feature.

    Blocks of one position are merged in pairs, until one is left: between the two,
    keys decay to the end of the first block, and the other vectors from the start of
    the second.
    """
    *rows, chunks, length, features = shape_of(key)
    count, size = 1, 1
    while count < length:
        count *= 2
    padding = [(0, 0)] * (len(rows) + 1) + [(0, count - length), (0, 0)]

    def by_block(x):
        if count > length:
            x = pad(x, padding)
        # Blocks of all chunks share an axis: tensors of higher rank crash XLA on CPUs.
        # Heads keep theirs, which may be split over devices.
        return ops.reshape(x, (*rows, chunks * count, 1, features))

    log_decay, key, *lefts = map(by_block, (log_decay, key, *lefts))
    # The decays from the start of the block, and to its end.
    start, end = log_decay, ops.zeros_like(log_decay)
    products = [inner_products(x, key) for x in lefts]
    while count > 1:
        (start, later), (end, last) = map(_pairs, (start, end))
        far_key = ops.swapaxes(_pairs(key)[0] * ops.exp(end), -1, -2)
        from_start = ops.exp(later)
        products = [
            _below(*_pairs(product), (_pairs(x)[1] * from_start) @ far_key)
            for x, product in zip(lefts, products, strict=True)
        ]
        # The sums over the first block, and over the second.
        first, second = start[..., -1:, :], later[..., -1:, :]
        start = ops.concatenate([start, later + first], axis=-2)
        end = ops.concatenate([end + second, last], axis=-2)
        count, size = count // 2, 2 * size
        joined = (*rows, chunks * count, size, features)
        key, *lefts = (ops.reshape(x, joined) for x in (key, *lefts))
    return [product[..., :length, :length] for product in products]


def _pairs(x):
    """The first and the second of each pair of blocks `(..., blocks, size, dim)`."""
    return x[..., 0::2, :, :], x[..., 1::2, :, :]


def _below(first, second, between):
    """Merges two lower triangular blocks and the block below the first."""
    above = ops.concatenate([first, ops.zeros_like(between)], axis=-1)
    return ops.concatenate([above, ops.concatenate([between, second], -1)], axis=-2)


def map_features(config, query, key, map_weights):
    """Features of queries and keys.

    Raises:
        ValueError: For maps whose features have a log scale.
    """
    query_map, key_map = (
        unscaled_elu_features
        if function in (elu_features, elu_features.__wrapped__)
        else function
        for function in (config.query_map, config.key_map)
    )
    query, query_log_scale = query_map(query, *map_weights)
    key, log_scale = key_map(key, *map_weights)
    if query_log_scale is not None or log_scale is not None:
        raise ValueError(
            "With `log_decay` or `beta`, `feature_map` must be a map without a log "
            f"scale, such as 'elu'. Received: {config.key_map}"
        )
    return query, key


# Size of the matrices that are inverted.
BLOCK = 16


def running_sums(x, after=False):
    """The sums up to and including each position, along the second to last axis.

    With `after`, the sums over the positions after each one.
    """
    if BACKEND == "jax":
        import jax

        size = x.shape[-2]
        triangle = np.tri(size, k=-1).T if after else np.tri(size)
        # As a product, which is faster on a TPU, in float32 precision.
        with jax.default_matmul_precision("highest"):
            return ops.convert_to_tensor(triangle, x.dtype) @ x
    axis = len(x.shape) - 2
    if not after:
        return cumulative_sum(x, axis)
    later = ops.concatenate([x[..., 1:, :], ops.zeros_like(x[..., :1, :])], axis=-2)
    return ops.flip(cumulative_sum(ops.flip(later, axis=-2), axis), axis=-2)


def inverse_unit_lower(matrix):
    """The inverse of `I + matrix`.

    Args:
        matrix: `(..., n, n)`, zero on and above the diagonal; `n` is known.
    """
    size = matrix.shape[-1]
    if BACKEND != "jax" or device_kind() != "cpu":
        identity = ops.eye(size, dtype=matrix.dtype)
        right = ops.broadcast_to(identity, shape_of(matrix))
        return ops.solve_triangular(identity + matrix, right, lower=True)
    # JAX would call LAPACK, which is slower here and unavailable in a model exported to
    # TensorFlow. Blocks on the diagonal are inverted and merged pairwise.
    count = 1
    while count * BLOCK < size:
        count *= 2
    block = -(-size // count)
    missing = count * block - size
    if missing:
        before = [(0, 0)] * (len(matrix.shape) - 2)
        matrix = ops.pad(matrix, [*before, (0, missing), (0, missing)])

    def blocks(height, first):
        """Diagonal blocks, or with `first` 1 the blocks left of every second one."""
        rows = range(first * height, count * block, (1 + first) * height)
        columns = (row - first * height for row in rows)
        parts = [
            matrix[..., row : row + height, column : column + height]
            for row, column in zip(rows, columns, strict=True)
        ]
        return ops.stack(parts, axis=-3)

    inverses = _inverse(blocks(block, 0))
    while inverses.shape[-3] > 1:
        first, second = inverses[..., 0::2, :, :], inverses[..., 1::2, :, :]
        below = -second @ blocks(first.shape[-1], 1) @ first
        inverses = _below(first, second, below)
    return inverses[..., 0, :size, :size]


def _inverse(matrix):
    """Inverts `I + matrix` by inverses of diagonal blocks that double in size.

    Powers of the matrix, as in a Neumann series, grow beyond float32 precision if keys
    repeat; the entries of these inverses do not grow.
    """
    size = matrix.shape[-1]
    row, column = np.ogrid[:size, :size]
    inverse = ops.zeros_like(matrix) + ops.eye(size, dtype=matrix.dtype)
    half = 1
    while half < size:
        # The lower left quarters of blocks of twice the size.
        quarter = (row // half % 2 == 1) & (row // half - 1 == column // half)
        below = ops.where(quarter, matrix, 0.0)
        inverse = inverse - inverse @ below @ inverse
        half *= 2
    return inverse
