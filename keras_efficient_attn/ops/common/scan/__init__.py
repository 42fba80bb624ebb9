from keras_efficient_attn.ops.common.scan.dispatch import (
    recompute_scan,
    vector_jacobian_product,
)

__all__ = ["recompute_scan", "vector_jacobian_product"]
