"""What the package reads of TensorFlow that is not public; it works with 2.21.

`tf.recompute_grad`, which `keras.remat` calls, does not tell a function that it is
being rerun. Its recomputing function is found among the callers, by its name.
"""

import functools
import inspect
import sys
import types

import tensorflow as tf

from keras_efficient_attn.ops.common.backend import private_name_error

WORKS_WITH = "2.21"
# The recomputing function inside `tf.recompute_grad`.
RECOMPUTING_FUNCTION = "inner_recompute_grad"


def in_recomputation():
    """Whether `tf.recompute_grad` is rerunning the caller for its gradient.

    Raises:
        RuntimeError: If TensorFlow recomputes by a function of another name.
    """
    function = inspect.unwrap(tf.recompute_grad)
    if RECOMPUTING_FUNCTION not in _names_inside(function.__code__):
        raise private_name_error(
            "TensorFlow",
            tf.__version__,
            f"{function.__module__}.{RECOMPUTING_FUNCTION}",
            WORKS_WITH,
        )
    frame = sys._getframe(1)
    while frame is not None:
        is_same_name = frame.f_code.co_name == RECOMPUTING_FUNCTION
        if is_same_name and frame.f_globals.get("__name__") == function.__module__:
            return True
        frame = frame.f_back
    return False


@functools.cache
def _names_inside(code):
    """The names of all functions that are defined inside one."""
    names = set()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= {constant.co_name} | _names_inside(constant)
    return names
