"""Feature maps around the mean of the queries, in few coordinates.

With queries `q` of mean `μ`, `exp(q·k) = exp((q − μ)·k) exp(μ·k)`: features estimate
the first factor only; the second is a log weight of the key. Coordinates that the
features do not see contribute their mean over Gaussian queries of variance `v`, `E
exp(q·k) = exp(v k² / 2)`, also as a log weight.

The maps have the form of `feature_maps`; `features` is one of these, or a function
below. `center` and `unseen_variance` have the shape `(heads, 1, 1, head_dim)`, the
latter 0 for coordinates that are seen.
"""

from keras import ops

from keras_efficient_attn.ops.linear_attention.feature_maps import (
    optimal_positive_features,
)


def query_features(features, x, center, unseen_variance, *weights):
    """Features of centred queries."""
    return features(x - center, *weights)


def key_features(features, x, center, unseen_variance, *weights):
    """Features of keys, with the log weight of the remaining factors."""
    mapped, log_scale = features(x, *weights)
    log_weight = ops.sum(x * (center + 0.5 * unseen_variance * x), axis=-1)
    return mapped, log_scale + log_weight


def seen_random_features(x, seen, shape, projection, hyperbolic=False):
    """`optimal_positive_features` of the coordinates where `seen` is 1."""
    return optimal_positive_features(x * seen, projection, shape, hyperbolic)


def seen_polynomial_features(x, features, rank):
    """Polynomial features of the first `rank` coordinates."""
    return features(x[..., :rank])
