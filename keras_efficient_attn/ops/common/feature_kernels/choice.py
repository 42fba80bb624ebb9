"""The options of linear attention, as one object, and the kernel for a call, if any."""

import collections.abc
import dataclasses
import importlib.metadata
import importlib.util

import keras

from keras_efficient_attn.ops.common import kernels
from keras_efficient_attn.ops.common.backend import is_traced_by_torch
from keras_efficient_attn.ops.common.checks import check_positive_int
from keras_efficient_attn.ops.common.plan import block_sizes, has_kernels

# Lowest compute capability with bfloat16 multiplication.
LEAST_CAPABILITY = 8
KERNELS = {
    "pallas": kernels.Kernel("jax", ("float32", "bfloat16")),
    "triton": kernels.Kernel("torch", ("float32", "bfloat16", "float16")),
    "fla": kernels.Kernel("torch", ("float32", "bfloat16", "float16")),
}
# The largest heads and the most features of each.
LIMITS = {
    # The default number of random features for heads of 128 is 622.
    "pallas": (512, 1024),
    "triton": (512, 1024),
    "fla": (512, 256),
}
# Of kernels whose sums decay or are corrected.
GATED_LIMITS = {"pallas": (256, 256), "fla": (512, 256)}
# What flash-linear-attention's tiles of queries, keys and values are made of.
FLA_DIM_UNIT = 16
LEAST_TRITON = 3, 4


def _has_triton():
    """Whether Triton is installed and supports tuples as kernel arguments."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return True  # PyTorch's nightly builds ship it under another name.
    return tuple(map(int, version.split(".")[:2])) >= LEAST_TRITON


# Checked once, without importing them: `torch.compile` would trace the check.
HAS_PACKAGE = {
    "triton": _has_triton(),
    "fla": importlib.util.find_spec("fla") is not None,
}
PACKAGES = {"triton": "triton, 3.4 or later", "fla": "flash-linear-attention"}


def choose_kernel(query, key, value, state, config):
    """The module of the kernel for a call; `None` means the chunked form.

    Its `linear_attention` takes as many keys as queries.

    Args:
        query, key, value: `(batch, length, heads, dim)`.
        state: The state's tensors, by name, or `None`.
        config: `LinearAttentionConfig`.

    Raises:
        ValueError: If the configuration names a kernel that cannot run.
    """
    tensors = query, key, value, *(state or {}).values()
    name = _choose(LIMITS, tensors, config)
    # Written as statements, which `torch.compile` can trace.
    if name is None:
        return None
    if name == "pallas":
        from keras_efficient_attn.ops.common.feature_kernels import pallas as module
    elif name == "triton":
        from keras_efficient_attn.ops.common.feature_kernels import triton as module
    else:
        from keras_efficient_attn.ops.common.feature_kernels import fla as module
    return module


def choose_gated_kernel(query, key, value, state, config):
    """The name of the kernel of sums that decay or are corrected, or `None`.

    Args:
        query, key, value, state, config: As for `choose_kernel`.

    Raises:
        ValueError: If the configuration names a kernel that cannot run.
    """
    # `torch.compile` cannot trace flash-linear-attention.
    if config.implementation is None and is_traced_by_torch():
        return None
    tensors = query, key, value, *(state or {}).values()
    return _choose(GATED_LIMITS, tensors, config, _gated_obstacle)


def _choose(limits, tensors, config, other_obstacle=lambda *_: None):
    """The name of the kernel, of those with limits, that computes a call, or `None`."""
    asked = config.implementation
    if asked not in limits and (asked is not None or not has_kernels(tensors[0])):
        return None

    def obstacle(name, tensors):
        return other_obstacle(name, tensors, config) or _obstacle(
            name, tensors, config, *limits[name]
        )

    offered = {name: KERNELS[name] for name in limits}
    return kernels.choose(offered, asked, tensors, obstacle)


def _obstacle(name, tensors, config, most_dim, most_features):
    """The reason why a kernel cannot compute a call, or `None`."""
    query, _, value, *_ = tensors
    if not config.causal:
        return "needs causal=True. Received: causal=False"
    if config.chunk_size is not None:
        return f"needs chunk_size=None. Received: chunk_size={config.chunk_size}"
    dims = {"head_dim": query.shape[-1], "value_dim": value.shape[-1]}
    if max(dims.values()) > most_dim:
        return f"needs heads of at most {most_dim}. Received: {dims}"
    if config.num_features > most_features:
        received = config.num_features
        return f"needs at most {most_features} features. Received: {received}"
    return None if name == "pallas" else _torch_obstacle(name, query, config)


def _gated_obstacle(name, tensors, config):
    """The reason why flash-linear-attention cannot compute a gated call, or `None`.

    Float32 has the portable form, because the package rounds states to half precision.
    """
    if name != "fla":
        return None
    _, _, value, *_ = tensors
    dtype = keras.backend.standardize_dtype(value.dtype)
    if dtype == "float32":
        return "needs bfloat16 or float16. Received: `value` of float32"
    if config.output != "sum":
        return "needs normalize=False. Received: normalize=True"
    dims = {"features": config.num_features, "value_dim": value.shape[-1]}
    if any(dim % FLA_DIM_UNIT for dim in dims.values()):
        return f"needs multiples of {FLA_DIM_UNIT} as sizes. Received: {dims}"
    return None


def _torch_obstacle(name, query, config):
    """The missing requirement of a CUDA kernel, or `None`."""
    import torch

    if not HAS_PACKAGE[name]:
        return f"needs the package {PACKAGES[name]}, which is not installed"
    if not query.is_cuda:
        if name == "triton" and _interprets():
            return None
        return f"needs tensors on a CUDA device. Received: {query.device.type}"
    major = torch.cuda.get_device_properties(query.device).major
    if torch.version.hip is not None or major < LEAST_CAPABILITY:
        return f"needs an NVIDIA GPU of compute capability {LEAST_CAPABILITY} or more"
    return None


def _interprets():
    """Whether Triton runs kernels in its interpreter."""
    from keras_efficient_attn.ops.common.feature_kernels import triton_op

    return triton_op.INTERPRETED


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
        # Products of NumPy's narrow integers would overflow.
        return int(self.chunk_size or block_sizes().chunk_size)


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
