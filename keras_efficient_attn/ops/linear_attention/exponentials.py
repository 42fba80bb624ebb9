"""Exponentials of feature maps; `exponentials_torch` computes the same on PyTorch."""

from keras import ops

# Lower bound of exponential features, relative to the largest of their vector. It is
# far below rounding, but prevents the similarity of vectors with different large
# features from underflowing to zero.
FEATURE_FLOOR = 1e-15


def elu_plus_one(x):
    """`elu(x) + 1`, computed so that it stays positive where `elu(x)` rounds to −1."""
    # A form without a branch whose derivative at 0 is 1.
    positive = ops.relu(x)
    return positive + ops.exp(x - positive)


def relative_exponential(x, largest):
    """`exp(x − largest) + FEATURE_FLOOR`; `largest` has no gradient."""
    return ops.exp(x - largest) + FEATURE_FLOOR
