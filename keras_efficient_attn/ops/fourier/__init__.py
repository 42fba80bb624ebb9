from keras_efficient_attn.ops.fourier.api import fourier_attention
from keras_efficient_attn.ops.fourier.estimators import (
    best_radius,
    fourier_density,
    fourier_regression,
    gaussian_regression,
    kernel_integral,
)
from keras_efficient_attn.ops.fourier.kernel import POWERS
from keras_efficient_attn.ops.fourier.random_features import (
    kernel_frequencies,
    linear_error,
    squared_features,
    squared_features_size,
)

__all__ = [
    "POWERS",
    "best_radius",
    "fourier_attention",
    "fourier_density",
    "fourier_regression",
    "gaussian_regression",
    "kernel_frequencies",
    "kernel_integral",
    "linear_error",
    "squared_features",
    "squared_features_size",
]
