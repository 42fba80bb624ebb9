"""Codebooks: nearest codes, soft codes, moving averages, k-means.

Codebooks are `(heads, codes, dim)`. The choice of codes has no gradient.
"""

import functools

from keras import ops

from keras_efficient_attn.ops.common.backend import BACKEND, shape_of
from keras_efficient_attn.ops.common.chunking import (
    by_head,
    by_position,
    chunk_layout,
    pad_to,
)
from keras_efficient_attn.ops.common.numerics import (
    accumulator_dtype,
    greatest_index,
    max_along,
    sum_rows,
)
from keras_efficient_attn.ops.common.plan import (
    block_sizes,
    jit_on_jax,
    opaque_on_torch,
    symbolic,
)
from keras_efficient_attn.ops.common.rows import take_rows
from keras_efficient_attn.ops.common.scan import recompute_scan
from keras_efficient_attn.ops.vq_attention.config import make_codebook

if BACKEND == "jax":
    import jax
    import jax.numpy as jnp

# Keys per code that k-means++ reads.
KEYS_PER_CODE = 64
# A code with a smaller count keeps its position.
MIN_COUNT = 1e-2


@jit_on_jax()
def nearest_codes(key, codebook, metric=None):
    """The index of the nearest code of each key, which minimises `‖key − code‖`.

    Distances are in the dtype of accumulators.

    Args:
        key: `(batch, length, heads, dim)`.
        codebook: `(heads, codes, dim)`.
        metric: Optional symmetric `(heads, dim, dim)`, for the norm `x metric xᵀ`.

    Returns:
        int32 `(batch, length, heads)`.
    """
    dtype = accumulator_dtype(key, codebook)
    key, codebook = (ops.stop_gradient(ops.cast(t, dtype)) for t in (key, codebook))
    weighed = codebook if metric is None else codebook @ ops.stop_gradient(metric)
    heads, codes = codebook.shape[:2]
    length = shape_of(key)[1]
    size, chunks, groups = chunk_layout(
        length, block_sizes().quantize_chunk, key.shape[0], heads * codes
    )
    if isinstance(groups, int) and groups == 1:
        products = similarity(ops.swapaxes(key, 1, 2), codebook, weighed)
        return ops.swapaxes(greatest_index(products), 1, 2)
    xs = (pad_to(key, groups * chunks * size),)
    consts = codebook, weighed
    _, (index,) = recompute_scan(_nearest_step, (), xs, consts, num_steps=groups)
    return ops.cast(index[:, :length], "int32")


def _nearest_step(carry, x, consts):
    key = by_head(x[0], shape_of(x[0])[1])
    index = greatest_index(similarity(key, *(t[:, None] for t in consts)))
    return carry, (by_position(ops.cast(index, key.dtype)),)


def similarity(key, codebook, weighed):
    """`key·code − ‖code‖²/2`, which is `−‖key − code‖²/2` up to the key's norm.

    `weighed` is `codebook @ metric`, for the product `x metric yᵀ`.
    """
    products = key @ ops.swapaxes(weighed, -1, -2)
    return products - 0.5 * ops.sum(weighed * codebook, axis=-1)[..., None, :]


def responsibilities(key, codebook, sigma, log_weights=None):
    """`p(code | key)` of a Gaussian mixture, `softmax` of `log_joint` over the codes.

    Args:
        key: `(..., heads, chunks, length, dim)`.
        codebook: `(heads, codes, dim)`.
        sigma: `(heads, codes)`.
        log_weights: Optional `(heads, codes)`.

    Returns:
        `(..., heads, chunks, length, codes)`.
    """
    exponents = log_joint(key, codebook, sigma, log_weights)
    largest = ops.stop_gradient(max_along(exponents, axis=-1, keepdims=True))
    weights = ops.exp(exponents - largest)
    return weights / ops.sum(weights, axis=-1, keepdims=True)


def log_joint(key, codebook, sigma, log_weights=None):
    """`−‖key − code‖² / 2σ² − dim log σ + log_weight`: `log p(key, code)` + constant.

    Arguments and shape of the result are those of `responsibilities`.
    """
    sigma = sigma[:, None, None]
    half_norm = 0.5 * ops.sum(ops.square(key), axis=-1, keepdims=True)
    codes = codebook[:, None]
    exponents = (similarity(key, codes, codes) - half_norm) / ops.square(sigma)
    exponents = exponents - codebook.shape[-1] * ops.log(sigma)
    if log_weights is None:
        return exponents
    return exponents + log_weights[:, None, None]


def look_up(codebook, index):
    """The codes at `index` `(batch, length, heads)`: `(batch, length, heads, dim)`."""
    if BACKEND == "jax":
        # Head by head, so that XLA splits the heads over devices.
        take = functools.partial(jnp.take, axis=0)
        return jax.vmap(take, in_axes=(0, 2), out_axes=2)(codebook, index)
    heads, codes, dim = codebook.shape
    flat = ops.reshape(codebook, (heads * codes, dim))
    return ops.take(flat, index + codes * ops.arange(heads, dtype="int32"), axis=0)


def quantize(keys, codebook):
    """The codes of keys, with straight-through gradients to the keys."""
    codes = look_up(codebook.codes, keys.index)
    return keys._replace(key=keys.key + ops.stop_gradient(codes - keys.key))


def code_statistics(key, index, valid, num_codes):
    """The number of keys of each code, and their sum.

    Args:
        key: `(batch, length, heads, dim)`.
        index: int32 `(batch, length, heads)`, their codes.
        valid: `(batch, length)`, 0 for keys to ignore.
        num_codes: Number of codes.

    Returns:
        `(counts, sums)`: `(heads, codes)` and `(heads, codes, dim)`.
    """
    heads, dim = key.shape[2:]
    weight = ops.zeros_like(key[..., :1]) + valid[:, :, None, None]
    rows = ops.concatenate([weight, key * weight], axis=-1)
    if BACKEND == "jax":
        # Head by head, as in `look_up`.
        add = jax.vmap(lambda total, i, row: total.at[i].add(row), in_axes=(0, 2, 2))
        totals = add(jnp.zeros((heads, num_codes, dim + 1), rows.dtype), index, rows)
    else:
        # Indices into the codes of all heads, one head after the other.
        index = index + num_codes * ops.arange(heads, dtype="int32")
        totals = sum_rows(
            ops.reshape(rows, (-1, dim + 1)),
            ops.reshape(index, (-1,)),
            heads * num_codes,
        )
        totals = ops.reshape(totals, (heads, num_codes, dim + 1))
    return totals[..., 0], totals[..., 1:]


def update_averages(sums, counts, batch_sums, batch_counts, momentum):
    """Exponential moving averages of the sums and counts of each code.

    Both decay together, so that a code `sum / count` without keys does not move. Below
    a count of `MIN_COUNT`, neither decays.
    """
    new_counts = momentum * counts + (1.0 - momentum) * batch_counts
    new_sums = momentum * sums + (1.0 - momentum) * batch_sums
    kept = new_counts > MIN_COUNT
    return (
        ops.where(kept[..., None], new_sums, sums),
        ops.where(kept, new_counts, counts),
    )


def codes_of(sums, counts):
    """The codes, `sum / count`."""
    return sums / ops.where(counts > MIN_COUNT, counts, MIN_COUNT)[..., None]


def enough_keys(keys, valid, num_codes):
    """`(keys, valid)` to draw codes from: a subset, to limit the time."""
    keys, valid = at_least_one(keys, valid)
    if isinstance(keys.shape[0], int):
        stride = max(1, keys.shape[0] // (KEYS_PER_CODE * num_codes))
        keys, valid = keys[::stride], valid[::stride]
    return keys, valid


def at_least_one(keys, valid):
    """`(keys, valid)`, or a key that is not valid instead of none."""
    if keys.shape[0] == 0:
        keys, valid = (ops.zeros((1, *x.shape[1:]), x.dtype) for x in (keys, valid))
    return keys, valid


def plus_plus(keys, valid, uniforms):
    """Codes by k-means++: keys, drawn by their squared distance to those drawn before.

    Args:
        keys: `(keys, heads, dim)`.
        valid: `(keys,)`, 0 for keys to exclude.
        uniforms: `(codes, heads)`, random numbers from [0, 1).

    Returns:
        `(heads, codes, dim)`.
    """
    keys, valid = ops.stop_gradient(keys), ops.stop_gradient(valid)
    weights = ops.zeros_like(keys[..., 0]) + valid[:, None]
    first = ops.cast(ops.arange(uniforms.shape[0]) == 0, keys.dtype)
    _, (codes,) = recompute_scan(
        _draw_step, (weights,), (uniforms, first), (keys, valid)
    )
    return ops.transpose(codes, (1, 0, 2))


def _draw_step(carry, x, consts):
    (distance,), (uniform, first), (keys, valid) = carry, x, consts
    # The small constant matters only if every key has been drawn.
    cumulative = ops.cumsum(distance + 1e-12 * valid[:, None], axis=0)
    target = uniform * cumulative[-1] * (1.0 - 1e-6)
    index = ops.sum(ops.cast(cumulative <= target, "int32"), axis=0)
    # On PyTorch, sums of int32 are int64, which take_along_axis accepts.
    chosen = ops.take_along_axis(keys, index[None, :, None], axis=0)
    new = ops.sum(ops.square(keys - chosen), axis=-1) * valid[:, None]
    nearer = ops.where(new < distance, new, distance)
    return (ops.where(first > 0, new, nearer),), (chosen[0],)


@jit_on_jax()
@opaque_on_torch
def draw_once(codes, drawn, keys, valid, uniforms):
    """The codes if already drawn or without keys, otherwise drawn by `plus_plus`.

    Args:
        codes: `(heads, codes, dim)`.
        drawn: Boolean scalar.
        keys, valid, uniforms: As for `plus_plus`.
    """
    return ops.cond(
        ops.logical_or(drawn, ops.sum(valid) <= 0),
        lambda: codes,
        lambda: plus_plus(keys, valid, uniforms),
    )


@jit_on_jax()
def batch_statistics(key, index, valid, codebook):
    """`code_statistics`, and the squared norms `(heads, 2)` of errors and of keys."""
    counts, sums = code_statistics(key, index, valid, codebook.shape[1])
    errors = ops.sum(ops.square(key - look_up(codebook, index)), axis=-1)
    norms = ops.stack([errors, ops.sum(ops.square(key), axis=-1)], axis=-1)
    return counts, sums, ops.sum(norms * valid[:, :, None, None], axis=(0, 1))


@jit_on_jax()
def random_keys(key, valid, uniforms):
    """A random key for each code, and whether there is one.

    Args:
        key: `(batch, length, heads, dim)`.
        valid: `(batch, length)`, 0 for keys to exclude.
        uniforms: `(heads, codes)`, random numbers from [0, 1).

    Returns:
        `(heads, codes, dim)`, and 1 or 0, `(heads, codes)`.
    """
    keys, valid = ops.reshape(key, (-1, *key.shape[2:])), ops.reshape(valid, (-1,))
    keys, valid = at_least_one(keys, valid)
    number = shape_of(valid)[0]
    place = ops.cast(uniforms * ops.cast(number, uniforms.dtype), "int32")
    # Rounding may exceed the last index.
    place = ops.where(place < number, place, number - 1)
    (chosen,) = take_rows(place, ops.swapaxes(keys, 0, 1))
    return chosen, ops.take(valid, place, axis=0)


@jit_on_jax()
def lloyd(keys, codebook):
    """One iteration of k-means: each code moves to the mean of its nearest keys.

    Args:
        keys: `(keys, heads, dim)`.
        codebook: `(heads, codes, dim)`.

    Returns:
        `(codebook, counts, error)`: the new codes, the number of keys of each old code,
        `(heads, codes)`, and the mean squared distance of keys to the old codes,
        `(heads,)`.
    """
    index = nearest_codes(keys[None], codebook)
    valid = ops.ones_like(keys[None, :, 0, 0])
    counts, sums = code_statistics(keys[None], index, valid, codebook.shape[1])
    squares = ops.sum(ops.square(keys - look_up(codebook, index)[0]), axis=-1)
    means = sums / ops.where(counts > 0, counts, 1.0)[..., None]
    codebook = ops.where((counts > 0)[..., None], means, codebook)
    return codebook, counts, ops.sum(squares, axis=0) / keys.shape[0]


@symbolic
def soft_codes(key, codebook, sigma=None, log_weights=None):
    """The share of each code in each key, and a key's log mass.

    ```
    joint[c] = −‖key − code[c]‖² / 2σ[c]² − dim log σ[c] + log_weight[c]
    share    = softmax(joint)                     Σ_c share[c] = 1
    log_mass = log Σ_c exp(joint[c])
    ```

    With `normalize=True`, linear attention with the features `exp(q·code)` of queries
    and `share` of keys is `ops.vq_attention` with soft codes and no window.

    Performer's positive features of keys are soft codes too. For projections `ω`, with
    `codebook = ω`, σ = 1 and `log_weights = ‖ω‖² / 2`,

    ```
    exp(ω·key − ‖key‖² / 2) = exp(log_mass) share
    ```

    is an identity: a mixture of Gaussians around `ω` that weigh `exp(‖ω‖² / 2)`. They
    differ in the factor `exp(log_mass)` of each key, which soft codes omit, and in the
    origin of the codes: `ω` is drawn independently of the keys. With projections of one
    norm, all codes have equal weights.

    Args:
        key: `(batch, length, heads, dim)`.
        codebook: `(heads, codes, dim)`.
        sigma: `(heads,)` or `(heads, codes)`, positive. Defaults to `None`: 1.
        log_weights: `(heads, codes)`, logarithms up to a constant. Defaults to `None`:
            equal weights.

    Returns:
        `(share, log_mass)`: `(batch, length, heads, codes)` and
        `(batch, length, heads)`, float32 or wider.

    Raises:
        ValueError: If shapes do not agree, or a `sigma` is not positive.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import ops
    >>> key = keras.random.normal((1, 100, 4, 32))
    >>> projections = keras.random.normal((4, 64, 32))
    >>> norms = keras.ops.sum(projections**2, axis=-1)
    >>> share, log_mass = ops.soft_codes(key, projections, log_weights=norms / 2)
    >>> features = keras.ops.exp(log_mass)[..., None] * share

    Reference:
        - [Su, 2023](https://kexue.fm/archives/9862), soft codes and Performer
        - [Choromanski et al., 2021](https://arxiv.org/abs/2009.14794), Performer
    """
    key = ops.convert_to_tensor(key)
    codebook = ops.convert_to_tensor(codebook)
    if len(key.shape) != 4 or len(codebook.shape) != 3:
        raise ValueError(
            "`key` must be (batch, length, heads, dim) and `codebook` (heads, codes, "
            f"dim). Received: key.shape={tuple(key.shape)}, "
            f"codebook.shape={tuple(codebook.shape)}"
        )
    if tuple(key.shape[2:]) != (codebook.shape[0], codebook.shape[2]):
        raise ValueError(
            "`codebook` must have the heads and the dim of `key`. Received: "
            f"codebook.shape={tuple(codebook.shape)}, key.shape={tuple(key.shape)}"
        )
    dtype = accumulator_dtype(key, codebook)
    if sigma is None:
        sigma = ops.ones(codebook.shape[:1], dtype)
    mixture = make_codebook(codebook, sigma, log_weights)
    mixture = [None if t is None else ops.cast(t, dtype) for t in mixture]
    by_head = ops.swapaxes(ops.cast(key, dtype), 1, 2)[:, :, None]
    joint = ops.swapaxes(log_joint(by_head, *mixture)[:, :, 0], 1, 2)
    largest = ops.stop_gradient(max_along(joint, axis=-1, keepdims=True))
    weights = ops.exp(joint - largest)
    mass = ops.sum(weights, axis=-1, keepdims=True)
    return weights / mass, ops.squeeze(ops.log(mass) + largest, axis=-1)
