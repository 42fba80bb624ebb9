"""The options of linear attention, as one object."""

import collections.abc
import dataclasses

from keras_efficient_attn.ops.common.checks import check_positive_int
from keras_efficient_attn.ops.common.plan import block_sizes

# Implementations of linear attention, except the reference.
IMPLEMENTATIONS = ("chunked", "pallas", "triton", "fla")


def given_features(features, *_):
    """The feature map for precomputed features: returns them, and `None`."""
    return features, None


@dataclasses.dataclass(frozen=True)
class LinearAttentionConfig:
    """All options of linear attention, as one static argument.

    Attributes:
        query_map, key_map: `(x, *map_weights) -> (features, log_scale)`, acting on
            the last axis of `x` `(batch, heads, chunks, chunk_size, head_dim)`; the
            true features are `features * exp(log_scale)`, and `log_scale` (one axis
            less) may be `None`. Pass the same function objects for the same maps: JAX
            compiles once per object.
        num_features: Size of the features.
        causal: Whether query `t` sees keys `0..t` only. Defaults to `False`.
        chunk_size: Positions per chunk; affects speed only. Defaults to `None`: the
            device's plan.
        output: `"normalized"` (the default), `"sum"` (without division), or
            `"partial"`: values, totals and log scales for `online_softmax.merge`.
        window: Number of nearest keys to attend to exactly, for
            `windowed_linear_attention`. Defaults to `None`.
        implementation: `"chunked"`, `"pallas"`, `"triton"`, `"fla"`, or `None` (the
            default): by device. See `ops.linear_attention`.
        rowwise_maps: Whether the maps act on the last axis only, for any axes before
            it, and read matrices `(n, m)` as weights. A kernel then computes features
            itself, and they never exist in memory. Defaults to `False`.
        entrywise: `(x, *map_weights) -> Entrywise`, if both maps are entrywise: a
            Triton kernel then computes features itself. Defaults to `None`.
    """

    query_map: collections.abc.Callable
    key_map: collections.abc.Callable
    num_features: int
    causal: bool = False
    chunk_size: int | None = None
    output: str = "normalized"
    window: int | None = None
    implementation: str | None = None
    rowwise_maps: bool = False
    entrywise: collections.abc.Callable | None = None

    def __post_init__(self):
        check_positive_int("chunk_size", self.chunk_size, optional=True)
        check_positive_int("window", self.window, optional=True)
        if self.implementation not in (None, *IMPLEMENTATIONS):
            raise ValueError(
                f"`implementation` must be None or one of {IMPLEMENTATIONS}. Received: "
                f"implementation={self.implementation!r}"
            )

    @property
    def chunk_length(self):
        """Positions per chunk, from the argument or the plan."""
        return self.chunk_size or block_sizes().chunk_size


def features_config(num_features, *, causal=False, normalize=True, chunk_size=None):
    """The `LinearAttentionConfig` for precomputed features; see `linear_attention`."""
    return LinearAttentionConfig(
        given_features,
        given_features,
        num_features,
        causal=causal,
        chunk_size=chunk_size,
        output="normalized" if normalize else "sum",
        rowwise_maps=True,
    )
