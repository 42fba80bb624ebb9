"""Runs a function as each backend's users run it, and measures its memory.

Each backend has a module with

- `Program(function, trainable=(), fixed=(), gradients=False, optimizer=None)`:
  the function, compiled (JAX, TensorFlow) or eager (PyTorch). `trainable` and `fixed`
  are the Keras variables that it reads. They are arguments of the compiled function, so
  that the compiler cannot fold them into constants. Called with tensors, the program
  returns the function's outputs. With `gradients` its first argument is the cotangent
  of the single output, it assigns new values of `fixed`, as a training step does, and
  it returns a list: the output, the gradients of all floating-point arguments and the
  gradients of all `trainable` variables. With an `optimizer`, built for `trainable`, it
  takes an optimizer step instead of returning the variables' gradients.
- `wait(outputs)`: returns when the outputs have been computed.
- `peak_memory(program, inputs)`: `(bytes, kind of memory)` of one call.
- `device()`: the device's name.
"""

import keras

from keras_efficient_attn.ops.common import backend


def backend_module():
    """The module of Keras' backend."""
    return backend.backend_module(__package__)


def make_program(function, layer=None, gradients=False, optimizer=None):
    """A `Program` of a function that reads the weights of a layer."""
    trainable, fixed = [], []
    if layer is not None:
        trainable, fixed = layer.trainable_variables, layer.non_trainable_variables
    return backend_module().Program(function, trainable, fixed, gradients, optimizer)


def compile_function(function, gradients: bool = False):
    """Compiles a function of tensors as the backend's users would.

    `jax.jit`, `tf.function(jit_compile=True)` (falling back to a plain graph where XLA
    refuses), or the function itself on PyTorch.

    Args:
        function: Callable of tensors; with `gradients`, of one output.
        gradients: Whether to compute the gradients of all floating-point arguments
            as well. Defaults to `False`.

    Returns:
        Callable of the same arguments that gives the function's outputs; with
        `gradients`, callable of a cotangent and the arguments that gives a list of
        the output and the gradients.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import benchmark
    >>> square = benchmark.compile_function(lambda x: x * x, gradients=True)
    >>> output, gradient = square(keras.ops.ones(3), keras.ops.ones(3))
    """
    return make_program(function, gradients=gradients)


def wait(outputs):
    """Returns when tensors, in any nesting, have been computed."""
    backend_module().wait(outputs)


def is_float(tensor):
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(tensor.dtype))
