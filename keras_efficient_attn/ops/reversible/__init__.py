from keras_efficient_attn.ops.reversible.api import (
    Half,
    reversible_chain,
)

__all__ = [
    "Half",
    "reversible_chain",
]
