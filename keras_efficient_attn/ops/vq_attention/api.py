"""Softmax attention over vector-quantised keys, in linear time."""

import functools

import keras
from keras import ops

from keras_efficient_attn.ops.common.block_softmax import (
    attend_at,
    attend_near,
    attend_recent,
    keys_seen,
)
from keras_efficient_attn.ops.common.chunking import fit_length, pad_length
from keras_efficient_attn.ops.common.compiled import compiled
from keras_efficient_attn.ops.common.masks import SlidingWindow
from keras_efficient_attn.ops.common.numerics import accumulator_dtype
from keras_efficient_attn.ops.common.online_softmax import finish, merge
from keras_efficient_attn.ops.common.state import make_state
from keras_efficient_attn.ops.vq_attention import reference
from keras_efficient_attn.ops.vq_attention.codebook import (
    look_up,
    nearest_codes,
    straight_through,
)
from keras_efficient_attn.ops.vq_attention.compressed import (
    causal_compressed_attention,
    full_compressed_attention,
)
from keras_efficient_attn.ops.vq_attention.expanded import (
    causal_expanded_attention,
    expanded_attention_in_a_block,
    full_expanded_attention,
    num_features,
)

# By `order`. The pairs of a block cost less than a read of the sums of many features.
BLOCK_LENGTHS = {0: 128, 2: 512}
REDUCTIONS = ("scan", "matmul", "cumsum")
ORDERS = (0, 2)
# Those that a cache has: the last one where a rank leaves directions out.
CACHE_NAMES = ("code_sum", "code_count", "code_square")
WINDOW_NAMES = ("window_key", "window_value", "window_mask")


def vq_attention(
    query,
    key,
    value,
    codebook,
    *,
    sigma=None,
    order=0,
    rank=None,
    window=None,
    quantize_window=False,
    cache=True,
    gradient_through_cache=True,
    key_mask=None,
    causal=False,
    position_query=None,
    position_key=None,
    state=None,
    block_length=None,
    reduction=None,
    implementation=None,
):
    """Softmax attention to near keys, and to the codes of far ones, in linear time.

    ```
    w[t, s]   = exp(q[t]·k[s])                     if |t − s| < window
                Σ_c p(c | k[s]) exp(q[t]·code[c])  otherwise
    output[t] = Σ_s w[t, s] v[s] / Σ_s w[t, s]
    ```

    `p(c | k)` is 1 for the nearest code or, with `sigma`, the responsibilities
    `softmax(−‖k − code‖² / 2σ²)` of a Gaussian mixture; as σ → 0 these are the
    same. Far keys are summed up per code, by their number and the mean of their
    values, and all weights have one denominator. A query that sees no key gets
    zeros. Nearest codes have no derivative; nor have the codes, without `sigma`.

    With `order=2`, a far key is expanded around its code, and its weight, which stays
    positive, is

    ```
    exp(q[t]·code) (1 + x + x²/2 + y/2)       δ = k[s] − code
    x = Σ_{i < rank} q[t, i] δ[i]             y = Σ_{i ≥ rank} q[t, i]² mean(δ[i]²)
    ```

    the mean being over the far keys of the same code on the same side of the query.
    The first `rank` coordinates should thus be those in which keys differ most from
    their codes. The cache holds, per code, the sums of the features of `x` times the
    values: `(rank + 1)(rank + 2) / 2` times the size that it has with `order=0`.

    Args:
        query: `(batch, query_length, heads, dim)`, scaled as the dot product should
            be: there is no other scale.
        key: `(batch, key_length, heads, dim)`.
        value: `(batch, key_length, heads, value_dim)`.
        codebook: `(heads, codes, dim)`.
        sigma: Optional `(heads,)`, positive.
        order: 0 (the default), or 2 to expand far keys around nearest codes.
        rank: With `order=2`, from how many coordinates on only the mean square of
            residuals counts. Defaults to `None`: all of them count in full.
        window: A query sees itself and `window - 1` earlier keys exactly and, if not
            causal, as many later ones. Defaults to `None`: codes for all keys.
        quantize_window: Whether keys in the window are replaced by their codes too,
            with straight-through gradients (Transformer-VQ). Defaults to `False`.
        cache: Whether keys beyond the window are seen at all. Defaults to `True`.
        gradient_through_cache: Whether values, with `order=2` keys, and with `sigma`
            keys and codes, get a gradient through the weights beyond the window;
            queries always do. Defaults to `True`.
        key_mask: Optional boolean `(batch, key_length)`, `True` for keys to attend.
        causal: Whether query `t` sees keys `0..t` only. Defaults to `False`.
        position_query: Optional, of the shape of `query`; with `position_key`.
        position_key: Optional `(distances, heads, dim)`: its products with
            `position_query` are added to the logits in the window. Distances are
            `window - 1` down to 0 or, if not causal, to `1 - window`.
        state: Optional state from `vq_attention_state` or an earlier call: the keys
            of earlier segments. Needs `causal=True` and equal lengths.
        block_length: Positions in a block; changes the speed, not the result beyond
            rounding. Defaults to 128, with `order=2` to 512.
        reduction: How the caches before the blocks are summed, for the speed:
            `"scan"` one block after the other, or several at once by `"matmul"` or
            `"cumsum"`. Defaults to what was fastest on CPUs: `"scan"` on TensorFlow,
            `"cumsum"` on JAX and PyTorch.
        implementation: `"chunked"` (the default) or `"reference"`, the quadratic
            definition.

    Returns:
        `(batch, query_length, heads, value_dim)` in the dtype of `value`; with a
        `state`, the pair of that and the state after the last position.

    Raises:
        ValueError: If shapes do not agree, if an argument is invalid, or for
            arguments that need another: `window` for `quantize_window`,
            `cache=False` and positions; `causal` for `state`; `order=2`, which
            excludes `sigma`, `quantize_window` and `cache=False`, for `rank`.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import ops
    >>> x = keras.random.normal((1, 1000, 4, 32)) * 32**-0.25
    >>> codebook = keras.random.normal((4, 64, 32)) * 32**-0.25
    >>> ops.vq_attention(x, x, x, codebook, window=32, causal=True).shape
    (1, 1000, 4, 32)

    Reference:
        - [Lingle, 2023](https://arxiv.org/abs/2309.16354), Transformer-VQ
    """
    _check_shapes(query, key, value, codebook)
    for name, number in (("window", window), ("block_length", block_length)):
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ValueError(
                f"`{name}` must be a positive integer or None. Received: "
                f"{name}={number!r}"
            )
    if reduction not in (None, *REDUCTIONS):
        raise ValueError(
            f"`reduction` must be None or one of {', '.join(REDUCTIONS)}. Received: "
            f"reduction={reduction!r}"
        )
    if implementation not in (None, "chunked", "reference"):
        raise ValueError(
            "`implementation` must be None, 'chunked' or 'reference'. Received: "
            f"implementation={implementation!r}"
        )
    positions = position_query is not None or position_key is not None
    if window is None and (quantize_window or not cache or positions):
        raise ValueError(
            "`quantize_window`, `cache=False` and `position_key` need a `window`. "
            "Received: window=None"
        )
    if positions:
        _check_positions(query, position_query, position_key, window, causal)
    if quantize_window and sigma is not None:
        raise ValueError(
            "`quantize_window` puts the nearest code in the place of a key, and "
            "excludes `sigma`. Received both."
        )
    check_order(order, rank, query.shape[-1])
    if order == 2 and (sigma is not None or quantize_window or not cache):
        raise ValueError(
            "`order=2` expands the keys beyond the window around nearest codes, and "
            "excludes `sigma`, `quantize_window` and `cache=False`. Received: "
            f"sigma={sigma}, quantize_window={quantize_window}, cache={cache}"
        )
    if state is not None:
        lengths = query.shape[1], key.shape[1]
        if not causal or implementation == "reference":
            raise ValueError(
                "`state` needs `causal=True`, and excludes the reference. Received: "
                f"causal={causal}, implementation={implementation!r}"
            )
        if None not in lengths and lengths[0] != lengths[1]:
            raise ValueError(
                "With `state`, queries and keys must have the same length. Received: "
                f"query length {lengths[0]}, key length {lengths[1]}"
            )
    arguments = dict(
        sigma=sigma,
        order=order,
        rank=rank,
        window=window,
        quantize_window=quantize_window,
        cache=cache,
        key_mask=key_mask,
        causal=causal,
        position_query=position_query,
        position_key=position_key,
    )
    if implementation == "reference":
        if not gradient_through_cache:
            raise ValueError(
                "The reference has no cache whose gradient could be left out. "
                "Received: implementation='reference', gradient_through_cache=False"
            )
        return reference.vq_attention(query, key, value, codebook, **arguments)
    index = None
    if arguments["sigma"] is None:
        dtype = accumulator_dtype(query, key, value)
        index = nearest_codes(ops.cast(key, dtype), ops.cast(codebook, dtype))
    output, new_state = quantized_attention(
        query,
        key,
        value,
        codebook,
        gradient_through_cache=gradient_through_cache,
        state=state,
        block_length=block_length,
        reduction=reduction,
        index=index,
        **arguments,
    )
    output = ops.cast(output, value.dtype)
    return output if state is None else (output, new_state)


def vq_attention_state(
    batch_size,
    num_heads,
    num_codes,
    key_dim,
    value_dim,
    *,
    soft=False,
    order=0,
    rank=None,
    window=None,
    cache=True,
    dtype="float32",
):
    """The state of causal attention over quantised keys before the first position.

    Args:
        batch_size, num_heads, num_codes, key_dim, value_dim: Sizes.
        soft: Whether the attention has a `sigma`. Defaults to `False`.
        order, rank, window, cache: As `vq_attention`.
        dtype: `"float32"` (the default) or `"float64"`.

    Returns:
        Dict of tensors, batch first: the sums of values and the numbers of keys per
        code, of each feature with `order=2`, and the last `window` keys.
    """
    options = dict(soft=soft, order=order, rank=rank, window=window, cache=cache)
    sizes = (batch_size, num_heads, num_codes, key_dim, value_dim)
    return make_state(vq_attention_state_spec(*sizes, **options, dtype=dtype))


def vq_attention_state_spec(
    batch_size,
    num_heads,
    num_codes,
    key_dim,
    value_dim,
    *,
    soft,
    order,
    rank,
    window,
    cache,
    dtype,
):
    """Names, shapes and dtypes of `vq_attention_state`."""
    rows = (batch_size, window)
    spec = {}
    if cache:
        heads = (num_heads, num_codes, key_dim)
        shapes = _cache_shapes(batch_size, *heads, value_dim, order, rank)
        spec = _named_cache([(shape, dtype) for shape in shapes])
    if window is not None:
        spec["window_key"] = ((*rows, num_heads, key_dim), dtype)
        spec["window_value"] = ((*rows, num_heads, value_dim), dtype)
        spec["window_mask"] = (rows, dtype)
        if cache and not soft:
            spec["window_code"] = ((*rows, num_heads), "int32")
    return spec


def check_order(order, rank, key_dim):
    """Raises a `ValueError` for an order or a rank that does not exist."""
    if isinstance(order, bool) or order not in ORDERS:
        raise ValueError(f"`order` must be 0 or 2. Received: order={order!r}")
    if rank is None:
        return
    if order == 0:
        raise ValueError(f"`rank` needs `order=2`. Received: order=0, rank={rank!r}")
    is_int = isinstance(rank, int) and not isinstance(rank, bool)
    if not is_int or not 1 <= rank <= key_dim:
        raise ValueError(
            "`rank` must be None or an integer from 1 to the dim of the keys, "
            f"{key_dim}. Received: rank={rank!r}"
        )


def _cache_shapes(batch, heads, codes, dim, value_dim, order, rank):
    sizes = (batch, heads, codes)
    if order == 0:
        return (*sizes, value_dim), sizes
    rank = dim if rank is None else rank
    features = num_features(rank)
    shapes = ((*sizes, features, value_dim), (*sizes, features))
    return (*shapes, (*sizes, dim - rank)) if rank < dim else shapes


def _named_cache(cache):
    return dict(zip(CACHE_NAMES, cache, strict=False))


@compiled(
    "order",
    "rank",
    "window",
    "quantize_window",
    "cache",
    "gradient_through_cache",
    "causal",
    "block_length",
    "reduction",
)
def quantized_attention(
    query,
    key,
    value,
    codebook,
    *,
    sigma=None,
    order=0,
    rank=None,
    window=None,
    quantize_window=False,
    cache=True,
    gradient_through_cache=True,
    key_mask=None,
    causal=False,
    position_query=None,
    position_key=None,
    state=None,
    block_length=None,
    reduction=None,
    index=None,
    at=None,
):
    """`vq_attention` for layers, which know the codes of the keys already.

    Args:
        index: `nearest_codes(key, codebook)`, of no use with `sigma`.
        at: Position of a single query among the keys, for causal attention without
            `state` and `position_key`. Defaults to `None`: all positions have one.

    Returns:
        `(output, state)`: the output in the accumulator's dtype, and the new state or
        `None`.
    """
    dtype = accumulator_dtype(query, key, value)
    tensors = (query, key, value, codebook, sigma, position_query, position_key)
    query, key, value, codebook, sigma, position_query, position_key = (
        None if t is None else ops.cast(t, dtype) for t in tensors
    )
    valid = ops.ones(ops.shape(key)[:2], dtype)
    if key_mask is not None:
        kept = ops.cast(key_mask, "bool")[..., None, None]
        key = ops.where(kept, key, ops.zeros_like(key))
        value = ops.where(kept, value, ops.zeros_like(value))
        valid = ops.cast(key_mask, dtype)
    codes = None
    if sigma is None:
        codebook = ops.stop_gradient(codebook)
        codes = look_up(codebook, index)
    near = straight_through(key, codes) if quantize_window else key
    far = _far_keys(key, codes, order)
    far_keys = (far, value, valid, index)
    if block_length is None:
        block_length = BLOCK_LENGTHS[order]
    if reduction is None:
        # The fastest on CPUs, in training and forward.
        reduction = "scan" if keras.backend.backend() == "tensorflow" else "cumsum"
    attend = functools.partial(
        _attend_to_codes,
        codebook=codebook,
        sigma=sigma,
        order=order,
        rank=rank,
        gradient=gradient_through_cache,
        block_length=block_length,
        reduction=reduction,
    )
    if at is not None:
        attend = attend if cache else None
        output, new_state = _at(attend, at, query, near, far_keys, window), None
    elif window is None:
        output, new_state = _without_window(attend, query, far_keys, causal, state)
    else:
        output, new_state = _with_window(
            attend if cache else None,
            query,
            near,
            far_keys,
            window,
            causal,
            state,
            codebook,
            order,
            position_query,
            position_key,
        )
    return output, new_state


def _far_keys(key, codes, order):
    """What stands for keys beyond the window: codes, residuals or, soft, the keys."""
    if codes is None:
        return key
    return codes if order == 0 else key - codes


def _attend_to_codes(
    query,
    keys,
    cache=None,
    causal=True,
    *,
    codebook,
    sigma,
    order,
    rank,
    gradient,
    block_length,
    reduction,
):
    """The part of the keys, and the cache after the last; from the empty cache on.

    No cache comes back where none was given and none was needed.
    """
    in_a_block = cache is None and _fit(block_length, query, keys[0])
    if cache is None and not (in_a_block and order == 2):
        batch, value_dim = ops.shape(query)[0], ops.shape(keys[1])[-1]
        sizes = (batch, *codebook.shape, value_dim)
        shapes = _cache_shapes(*sizes, order, rank)
        cache = tuple(ops.zeros(shape, query.dtype) for shape in shapes)
    if not gradient:
        keys = _each(ops.stop_gradient, keys)
        cache = None if cache is None else _each(ops.stop_gradient, cache)
        codebook, sigma = _each(ops.stop_gradient, (codebook, sigma))
    if order == 2:
        rank = codebook.shape[-1] if rank is None else rank
        if in_a_block:
            part = expanded_attention_in_a_block(query, *keys, codebook, rank, causal)
            return part, None
        arguments = (*keys, codebook, rank, cache, block_length)
        if causal:
            return causal_expanded_attention(query, *arguments, reduction)
        return full_expanded_attention(query, *arguments)
    arguments = (*keys, codebook, sigma, cache, block_length)
    if causal:
        return causal_compressed_attention(query, *arguments, reduction)
    return full_compressed_attention(query, *arguments)


def _fit(block_length, query, key):
    lengths = query.shape[1], key.shape[1]
    return all(isinstance(n, int) and 0 < n <= block_length for n in lengths)


def _at(attend, position, query, near, far_keys, window):
    """A single query, which sees the keys before it and its own."""
    far, value, valid, index = far_keys
    positions = ops.arange(ops.shape(value)[1], dtype="int32")
    distance = ops.cast(position, "int32") - positions
    parts = []
    if attend is not None:
        seen = valid * ops.cast(distance >= (window or 0), valid.dtype)
        part, _ = attend(query, (far, value, seen, index), causal=False)
        parts.append(part)
    if window is not None:
        rule = SlidingWindow(window, True)
        first, seen = keys_seen(position, rule, near, value, valid)
        parts.append(attend_at(position, query, *seen, rule, first))
    return finish(*merge(parts), normalize=True)


def _without_window(attend, query, keys, causal, state):
    cache = None
    if causal:
        keys = _each(lambda t: fit_length(t, ops.shape(query)[1]), keys)
        cache = None if state is None else _cache_of(state, query.dtype)
    part, cache = attend(query, keys, cache, causal)
    if state is not None:
        state = _named_cache(cache)
    return finish(*part, normalize=True), state


def _with_window(
    attend,
    query,
    near,
    far_keys,
    window,
    causal,
    state,
    codebook,
    order,
    position_query,
    position_key,
):
    """The window exactly; the rest through codes, of keys delayed by the window.

    `attend` is `None` for no rest.
    """
    length = total = ops.shape(query)[1]
    if query.shape[1] is None or query.shape[1] != near.shape[1]:
        # Queries after the last key still see those in the window before them.
        total = length if causal else _longer(length, ops.shape(near)[1])
        query, near, position_query = _each(
            lambda t: fit_length(t, total), (query, near, position_query)
        )
        far_keys = _each(lambda t: fit_length(t, total), far_keys)
    if state is None and isinstance(total, int) and total < window:
        position_key = _nearest_positions(position_key, window - total, causal)
        window = max(1, total)
    _, value, valid, index = far_keys
    rule = SlidingWindow(window, causal)
    relative = None if position_key is None else (position_query, position_key)
    if state is None:
        part = attend_near(query, near, value, valid, rule, relative=relative)
    else:
        new = {"window_key": near, "window_value": value, "window_mask": valid}
        if "window_code" in state:
            new["window_code"] = index
        history = {
            name: ops.concatenate([ops.cast(state[name], t.dtype), t], axis=1)
            for name, t in new.items()
        }
        recent = (history[name][:, 1:] for name in WINDOW_NAMES)
        # The rule asks for distances only: any start will do.
        part = attend_recent(query, *recent, rule, start=0, relative=relative)
    parts = [part]
    new_cache = None
    # A sequence that fits in the window has no far keys.
    fits = state is None and isinstance(total, int) and total <= window
    if attend is not None and not fits:
        if state is None:
            keys, cache = _delayed(far_keys, window, total), None
        else:
            keys = _leaving_window(history, codebook, order, total)
            cache = _cache_of(state, query.dtype)
        before, new_cache = attend(query, keys, cache)
        parts.append(before)
        if not causal:
            flipped = _each(lambda t: ops.flip(t, axis=1), (query, *far_keys))
            after, _ = attend(flipped[0], _delayed(flipped[1:], window, total))
            parts.append(_each(lambda t: ops.flip(t, axis=1), after))
    output = finish(*merge(parts), normalize=True)[:, :length]
    if state is None:
        return output, None
    new_state = {name: t[:, total:] for name, t in history.items()}
    if new_cache is not None:
        new_state.update(_named_cache(new_cache))
    return output, new_state


def _delayed(keys, window, total):
    return _each(lambda t: pad_length(t, window, 0)[:, :total], keys)


def _leaving_window(history, codebook, order, length):
    """The keys that leave the window while the queries of a segment pass."""
    key, value, valid = (history[name][:, :length] for name in WINDOW_NAMES)
    if "window_code" not in history:
        return key, value, valid, None
    index = history["window_code"][:, :length]
    far = _far_keys(key, look_up(codebook, index), order)
    return far, value, valid, index


def _cache_of(state, dtype):
    return tuple(ops.cast(state[name], dtype) for name in CACHE_NAMES if name in state)


def _each(function, tensors):
    return tuple(None if t is None else function(t) for t in tensors)


def _longer(first, second):
    if isinstance(first, int) and isinstance(second, int):
        return max(first, second)
    if keras.backend.backend() == "jax":
        # Symbolic lengths cannot be compared; their sum is long enough.
        return first + second
    return ops.maximum(first, second)


def _nearest_positions(position_key, number, causal):
    """Without the keys of the `number` farthest distances, on either side."""
    if position_key is None:
        return None
    last = position_key.shape[0] - (0 if causal else number)
    return position_key[number:last]


def _check_positions(query, position_query, position_key, window, causal):
    keys = (window if causal else 2 * window - 1, *query.shape[2:])
    if (
        position_query is None
        or position_key is None
        or tuple(position_query.shape) != tuple(query.shape)
        or tuple(position_key.shape) != keys
    ):
        received = (position_query, position_key)
        received = [None if t is None else tuple(t.shape) for t in received]
        raise ValueError(
            "`position_query` and `position_key` go together, with the shapes "
            f"{tuple(query.shape)} and {keys}. Received: the shapes {received}"
        )


def _check_shapes(query, key, value, codebook):
    shapes = {
        "query": tuple(query.shape),
        "key": tuple(key.shape),
        "value": tuple(value.shape),
    }
    for name, shape in shapes.items():
        if len(shape) != 4:
            raise ValueError(
                f"`{name}` must have the shape (batch, length, heads, dim). Received: "
                f"{name}.shape={shape}"
            )
    codes = tuple(codebook.shape)
    heads_and_dims = {shapes[name][2:] for name in ("query", "key")}
    if len(codes) != 3 or heads_and_dims != {(codes[0], codes[2])}:
        raise ValueError(
            "`query`, `key` and `codebook` must agree in heads and dim, `codebook` "
            "with the shape (heads, codes, dim). Received: "
            f"query.shape={shapes['query']}, key.shape={shapes['key']}, "
            f"codebook.shape={codes}"
        )
    if any(
        a is not None and b is not None and a != b
        for a, b in zip(shapes["key"][:3], shapes["value"][:3], strict=True)
    ):
        raise ValueError(
            "`key` and `value` must agree in batch, length and heads. Received: "
            f"key.shape={shapes['key']}, value.shape={shapes['value']}"
        )
