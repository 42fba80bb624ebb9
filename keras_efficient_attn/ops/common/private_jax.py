"""What the package calls of JAX that is not public; it works with JAX 0.10.

Splash attention has a gradient of its outputs only. That of its log-sum-exps, which
merging parts of a softmax needs, is computed by the two functions of its own gradient.
Where JAX has not both, with the parameters that are passed, a softmax runs in blocks.
"""

import importlib
import inspect

import jax

from keras_efficient_attn.ops.common.backend import attribute_or_none

WORKS_WITH = "0.10"
_MODULE = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel"
_BOTH = {
    "is_mqa",
    "mask_value",
    "attn_logits_soft_cap",
    "mask_function",
    "interpret",
    "q_layout",
    "k_layout",
    "v_layout",
    "bq",
    "bkv",
    "mask_info",
}
# The names of the private functions, and the parameters that are passed by name.
PARAMETERS = {
    "_splash_attention_bwd_dq": _BOTH,
    "_splash_attention_bwd_dkv": _BOTH | {"bkv_compute", "use_fused_bwd_kernel"},
}

try:
    _kernel = importlib.import_module(_MODULE)
except ImportError:
    _kernel = None
query_gradient = attribute_or_none(_kernel, "_splash_attention_bwd_dq")
key_value_gradients = attribute_or_none(_kernel, "_splash_attention_bwd_dkv")


def splash_obstacle():
    """The reason why splash attention cannot be used with this JAX, or `None`."""
    functions = query_gradient, key_value_gradients
    for function, (name, needed) in zip(functions, PARAMETERS.items(), strict=True):
        known = () if function is None else inspect.signature(function).parameters
        if not needed <= set(known):
            return (
                f"needs {_MODULE}.{name} as in JAX {WORKS_WITH}. Received: JAX "
                f"{jax.__version__}"
            )
    return None
