"""Feature maps that kernels compute: one function of every entry of a product.

```
φ(x)[i] = entry((rows · x)[i]) exp(log_scale(x))
```

A kernel receives `entry` by name, and `rows`, and computes the features block by block
where it needs them. Only the per-vector numbers are computed beforehand.
"""

import math
import typing

from keras import ops

# Vectors of fewer entries often have no entry above 0: `elu_features` scales them.
SCALED_WIDTH = 16


class Entrywise(typing.NamedTuple):
    """A feature map of one tensor of queries or keys.

    Attributes:
        entry: `"identity"`; `"elu"`, elu + 1; `"relu"`, ReLU + 1e-3; or `"exp"`.
        rows: `(features, head_dim)`, or `None` for the identity.
        log_scale: One axis less than the tensor, or `None` for 0.
    """

    entry: str
    rows: typing.Any = None
    log_scale: typing.Any = None


def elu_entries(x):
    """`feature_maps.elu_features`; `None` for vectors that it scales."""
    return None if x.shape[-1] < SCALED_WIDTH else Entrywise("elu")


def relu_entries(x, projection=None):
    """`feature_maps.relu_features`."""
    if projection is None:
        return Entrywise("relu")
    return Entrywise("relu", projection / math.sqrt(projection.shape[0]))


def exponential_entries(x):
    """`feature_maps.exponential_features`."""
    return Entrywise("exp")


def positive_random_entries(x, projection, hyperbolic=False):
    """`feature_maps.positive_random_features`."""
    if hyperbolic:
        projection = ops.concatenate([projection, -projection])
    squares = ops.sum(ops.square(ops.cast(x, projection.dtype)), axis=-1)
    log_scale = -0.5 * squares - 0.5 * math.log(projection.shape[0])
    return Entrywise("exp", projection, log_scale)
