"""Whether a call is gradient checkpointing's, which runs a function a second time."""

import sys

from keras_efficient_attn.ops.common.backend import backend_name
from keras_efficient_attn.ops.reversible.remembered import in_chain

# TensorFlow's name for the function of `tf.recompute_grad` that runs it again.
_TENSORFLOW_REPLAY = ("tensorflow.python.ops.custom_gradient", "inner_recompute_grad")


def is_replay():
    """Whether a backward pass is running this forward pass again.

    `keras.remat` around a layer, or around anything that contains it, calls it once
    for the output and, on TensorFlow and PyTorch, once more for the gradients. What a
    call does beside computing its output must not happen twice. JAX differentiates
    what it recorded, and calls nothing again. A reversible chain runs its halves twice
    as well, each time from the first state, and drops what the second run updates.
    """
    if in_chain():
        return False
    backend = backend_name()
    if backend == "torch":
        from keras_efficient_attn.ops.reversible.replay_torch import in_backward_pass

        return in_backward_pass()
    return backend == "tensorflow" and _called_by(*_TENSORFLOW_REPLAY)


def _called_by(module, function):
    frame = sys._getframe(1)
    while frame is not None:
        if (
            frame.f_code.co_name == function
            and frame.f_globals.get("__name__") == module
        ):
            return True
        frame = frame.f_back
    return False
