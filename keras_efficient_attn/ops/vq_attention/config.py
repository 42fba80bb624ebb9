"""Options, tensors and states of attention over quantised keys.

A cache holds, per code, the sum of its keys' values and their number. With `order=2` it
holds both per feature of the residuals and, if `rank` excludes coordinates, the sum of
the squared residuals in these. A state holds the cache of the keys that have left the
window, and the last `window` keys.
"""

import dataclasses
from typing import Any, NamedTuple

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.checks import (
    as_python_numbers,
    check_positive_int,
    check_positive_values,
)
from keras_efficient_attn.ops.common.plan import block_sizes
from keras_efficient_attn.ops.common.state import append_segment

ORDERS = (0, 2)
# The tensors of a state: of the cache, and of the window in the order of `Keys`.
CACHE_NAMES = ("code_sum", "code_count", "code_square")
WINDOW_NAMES = ("window_key", "window_value", "window_mask", "window_code")


@dataclasses.dataclass(frozen=True)
class VQConfig:
    """The keys that a query sees exactly, and the codes of the others.

    Attributes:
        soft: Whether a key has a share in every code instead of the nearest only.
        order: 0, or 2 to expand far keys around their codes to second order.
        rank: With `order=2`, the number of coordinates that are expanded; `None`
            for all.
        window: Number of nearest keys that are seen exactly; `None` for none.
        quantize_window: Whether keys in the window are also replaced by their codes.
        relative_positions: Whether logits in the window have a term for the distance.
        gradient_through_cache: Whether keys, values and codes get a gradient through
            the weights beyond the window.
        block_length: Positions per block; `None` for the plan's.
        kernels: Whether the device's kernels may compute.

    Raises:
        ValueError: For options that are invalid or exclude each other.
    """

    soft: bool = False
    order: int = 0
    rank: int | None = None
    window: int | None = None
    quantize_window: bool = False
    relative_positions: bool = False
    gradient_through_cache: bool = True
    block_length: int | None = None
    kernels: bool = True

    def __post_init__(self):
        as_python_numbers(self, "order", "rank", "window", "block_length")
        for argument in ("window", "block_length", "rank"):
            check_positive_int(argument, getattr(self, argument), optional=True)
        if isinstance(self.order, bool | float) or self.order not in ORDERS:
            raise ValueError(f"`order` must be 0 or 2. Received: order={self.order!r}")
        if self.order == 0 and self.rank is not None:
            raise ValueError(
                f"`rank` needs `order=2`. Received: order=0, rank={self.rank}"
            )
        if self.window is None and (self.quantize_window or self.relative_positions):
            raise ValueError(
                "`quantize_window` and relative positions need a `window`. Received: "
                f"quantize_window={self.quantize_window}, "
                f"relative_positions={self.relative_positions}, window=None"
            )
        if self.quantize_window and self.soft:
            raise ValueError(
                "`quantize_window` needs hard codes: it cannot be used with a `sigma`. "
                "Received: both"
            )
        if self.order == 2 and (self.soft or self.quantize_window):
            raise ValueError(
                "`order=2` needs hard codes, without `sigma` and `quantize_window`. "
                f"Received: quantize_window={self.quantize_window}, soft={self.soft}"
            )

    def check_key_dim(self, key_dim):
        """Raises `ValueError` for a `rank` above the keys' dim."""
        if self.rank is not None and self.rank > key_dim:
            raise ValueError(
                "`rank` must be None or an integer from 1 to the dim of the keys, "
                f"{key_dim}. Received: rank={self.rank}"
            )

    def expanded_dims(self, key_dim):
        """The number of coordinates, the first ones, that `order=2` expands."""
        return key_dim if self.rank is None else self.rank

    def block_size(self, num_codes):
        """Positions per block, from the argument or the plan."""
        if self.block_length is not None:
            return self.block_length
        plan = block_sizes()
        if self.order:
            return plan.expanded_code_block
        # The sums of all codes are read and written once per block.
        return max(plan.code_block, min(plan.largest_code_block, num_codes // 2))

    @property
    def longest_in_pairs(self):
        """With `order=2`, the longest sequence that is computed in one block."""
        if self.block_length is not None:
            return self.block_length
        return block_sizes().expanded_code_pairs


class Codebook(NamedTuple):
    """The codes of each head.

    Attributes:
        codes: `(heads, codes, dim)`.
        sigma: `(heads, codes)`, the widths of soft codes; `None` for hard codes.
        log_weights: Optional `(heads, codes)`, the mixture weights of soft codes.
    """

    codes: Any
    sigma: Any = None
    log_weights: Any = None


class Keys(NamedTuple):
    """Keys or their residuals, with their values.

    Attributes:
        key: `(batch, length, heads, dim)`: keys or their residuals; `None` where the
            `index` is enough.
        value: `(batch, length, heads, value_dim)`.
        valid: `(batch, length)`, 1 for keys that exist and 0 for others; `None` if all
            exist.
        index: int32 `(batch, length, heads)`, the nearest codes; `None` for soft codes.
    """

    key: Any
    value: Any
    valid: Any = None
    index: Any = None


class Positions(NamedTuple):
    """Queries and keys whose products are added to the logits in the window.

    Attributes:
        query: `(batch, length, heads, dim)`.
        key: `(distances, heads, dim)`, of decreasing distances.
    """

    query: Any
    key: Any


def map_tensors(function, tensors):
    """Applies a function to each tensor of a tuple, named or not; keeps `None`."""
    results = [None if t is None else function(t) for t in tensors]
    return type(tensors)(*results) if hasattr(tensors, "_fields") else tuple(results)


def with_valid(keys):
    """`Keys` that have `valid`."""
    if keys.valid is not None:
        return keys
    return keys._replace(valid=ops.ones(shape_of(keys.key)[:2], keys.key.dtype))


def make_codebook(codes, sigma=None, log_weights=None):
    """`Codebook`, with a width for each code.

    Raises:
        ValueError: If shapes do not agree, a width is not positive, or there are
            weights without widths.
    """
    if sigma is None:
        if log_weights is not None:
            raise ValueError(
                "`log_weights` need soft codes, with a `sigma`. Received: sigma=None"
            )
        return Codebook(codes)
    expected = tuple(codes.shape[:2])
    check_positive_values("sigma", sigma)
    sigma = ops.convert_to_tensor(sigma)
    if log_weights is not None:
        log_weights = ops.convert_to_tensor(log_weights)
    if tuple(sigma.shape) == expected[:1]:
        sigma = ops.broadcast_to(sigma[:, None], expected)
    shapes = {
        "sigma": f"(heads,) = {expected[:1]} or (heads, codes) = {expected}",
        "log_weights": f"(heads, codes) = {expected}",
    }
    for name, tensor in (("sigma", sigma), ("log_weights", log_weights)):
        if tensor is not None and tuple(tensor.shape) != expected:
            raise ValueError(
                f"`{name}` must have the shape {shapes[name]}. Received: "
                f"{name}.shape={tuple(tensor.shape)}"
            )
    return Codebook(codes, sigma, log_weights)


def num_features(rank):
    """Monomials of degree 0, 1 and 2 of `rank` coordinates."""
    return (rank + 1) * (rank + 2) // 2


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


def with_history(state, near):
    """The keys of a state's window, followed by a segment's keys."""
    # Soft codes have no `index`, the last of the four.
    given = [t for t in near if t is not None]
    return Keys(*append_segment(state, *given, names=WINDOW_NAMES[: len(given)]))


def leaving_keys(history, length, lengths):
    """The keys that a segment pushes out of the window.

    Args:
        history: `Keys` of the window and the segment, from `with_history`.
        length, lengths: As for `keep_last`.
    """
    leaving = map_tensors(lambda t: t[:, :length], history)
    if lengths is None:
        return leaving
    leaves = ops.arange(length, dtype="int32") < lengths[:, None]
    leaves = ops.cast(leaves, leaving.valid.dtype)
    value = leaving.value * leaves[..., None, None]
    return leaving._replace(value=value, valid=leaving.valid * leaves)


def named_window(recent):
    """The keys of a window as a dict of state tensors."""
    pairs = zip(WINDOW_NAMES, recent, strict=True)
    return {name: t for name, t in pairs if t is not None}


def state_spec(batch, heads, codes, key_dim, value_dim, config, dtype):
    """The tensors of a state: `{name: (shape, dtype)}`."""
    shapes = cache_shapes(batch, heads, codes, key_dim, value_dim, config)
    spec = {name: (shape, dtype) for name, shape in named_cache(shapes).items()}
    if config.window is not None:
        rows = (batch, config.window)
        spec["window_key"] = (*rows, heads, key_dim), dtype
        spec["window_value"] = (*rows, heads, value_dim), dtype
        spec["window_mask"] = rows, dtype
        if not config.soft:
            spec["window_code"] = (*rows, heads), "int32"
    return spec


def cache_shapes(batch, heads, codes, key_dim, value_dim, config):
    """The shapes of the tensors of a cache."""
    sizes = (batch, heads, codes)
    if config.order == 0:
        return (*sizes, value_dim), sizes
    rank = config.expanded_dims(key_dim)
    features = num_features(rank)
    shapes = (*sizes, features, value_dim), (*sizes, features)
    return shapes if rank == key_dim else (*shapes, (*sizes, key_dim - rank))


def check_codebook(query, codebook):
    """Raises `ValueError` for a codebook whose heads or dim are not the query's."""
    heads_and_dim, codes = tuple(query.shape[2:]), tuple(codebook.shape)
    if len(codes) != 3 or heads_and_dim != (codes[0], codes[2]):
        raise ValueError(
            "`codebook` must have the shape (heads, codes, dim), with the heads and "
            f"the dim of `query`. Received: query.shape={tuple(query.shape)}, "
            f"codebook.shape={codes}"
        )
