"""Detects calls in which gradient checkpointing reruns a function."""

from keras_efficient_attn.ops.common.backend import BACKEND
from keras_efficient_attn.ops.reversible.remembered import in_chain

if BACKEND == "torch":
    from keras_efficient_attn.ops.common.private_torch import in_backward_pass


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
    if BACKEND == "torch":
        return in_backward_pass()
    if BACKEND == "tensorflow":
        from keras_efficient_attn.ops.common.private_tensorflow import in_recomputation

        return in_recomputation()
    return False
