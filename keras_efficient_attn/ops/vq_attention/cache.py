"""The cache of attention over codes, and the state of a causal sequence.

A cache holds, per code, the sum of its keys' values and their number. With `order=2` it
holds both per feature of the residuals and, if `rank` excludes coordinates, the sum of
the squared residuals in these. A state holds the cache of the keys that have left the
window, and the last `window` keys.
"""

from keras import ops

CACHE_NAMES = ("code_sum", "code_count", "code_square")
# In the order of `Keys`.
WINDOW_NAMES = ("window_key", "window_value", "window_mask", "window_code")


def num_features(rank):
    """Monomials of degree 0, 1 and 2 of `rank` coordinates."""
    return (rank + 1) * (rank + 2) // 2


def empty_cache(batch, codebook, value_dim, config, dtype):
    """The cache before the first key, a tuple of tensors."""
    shapes = _cache_shapes(batch, *codebook.codes.shape, value_dim, config)
    return tuple(ops.zeros(shape, dtype) for shape in shapes)


def cache_of(state, config, dtype):
    """The cache in a state. The numbers of keys of hard codes have no derivative."""
    cache = tuple(ops.cast(state[name], dtype) for name in CACHE_NAMES if name in state)
    if config.soft or config.order:
        return cache
    sums, counts = cache
    return sums, ops.stop_gradient(counts)


def named_cache(cache):
    """A cache as a dict of state tensors."""
    return dict(zip(CACHE_NAMES, cache, strict=False))


def state_spec(batch, heads, codes, key_dim, value_dim, config, dtype):
    """The tensors of a state: `{name: (shape, dtype)}`."""
    shapes = _cache_shapes(batch, heads, codes, key_dim, value_dim, config)
    spec = {name: (shape, dtype) for name, shape in named_cache(shapes).items()}
    if config.window is not None:
        rows = (batch, config.window)
        spec["window_key"] = (*rows, heads, key_dim), dtype
        spec["window_value"] = (*rows, heads, value_dim), dtype
        spec["window_mask"] = rows, dtype
        if not config.soft:
            spec["window_code"] = (*rows, heads), "int32"
    return spec


def _cache_shapes(batch, heads, codes, key_dim, value_dim, config):
    sizes = (batch, heads, codes)
    if config.order == 0:
        return (*sizes, value_dim), sizes
    rank = config.expanded_dims(key_dim)
    features = num_features(rank)
    shapes = (*sizes, features, value_dim), (*sizes, features)
    return shapes if rank == key_dim else (*shapes, (*sizes, key_dim - rank))
