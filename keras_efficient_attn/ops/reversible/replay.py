"""Detects calls in which gradient checkpointing reruns a function."""

import sys

from keras_efficient_attn.ops.common.backend import BACKEND
from keras_efficient_attn.ops.reversible.remembered import in_chain

# TensorFlow's name for the recomputing function of `tf.recompute_grad`.
_TENSORFLOW_REPLAY = ("tensorflow.python.ops.custom_gradient", "inner_recompute_grad")


def is_replay():
    """Whether a backward pass is rerunning this forward pass.

    `keras.remat` around a layer, or around anything that contains it, calls it once
    for the output and, on TensorFlow and PyTorch, once more for the gradients. Side
    effects of a call must not happen twice. JAX differentiates the recorded computation
    and calls nothing again. A reversible chain also runs its halves twice, each time
    from the first state, and drops the updates of the second run.
    """
    if in_chain():
        return False
    backend = BACKEND
    if backend == "torch":
        from keras_efficient_attn.ops.reversible.replay_torch import in_backward_pass

        return in_backward_pass()
    return backend == "tensorflow" and _is_called_by(*_TENSORFLOW_REPLAY)


def _is_called_by(module, function):
    frame = sys._getframe(1)
    while frame is not None:
        if (
            frame.f_code.co_name == function
            and frame.f_globals.get("__name__") == module
        ):
            return True
        frame = frame.f_back
    return False
