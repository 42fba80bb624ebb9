"""Compiling whole operations on JAX, whose eager mode compiles each step of one."""

import functools

import keras


def compiled(*static_arguments):
    """Decorator: on JAX, compiles the function once per value of the arguments named.

    On other backends the function is called as it is: TensorFlow compiles whole
    models, and PyTorch has nothing to gain.
    """

    def decorate(function):
        @functools.cache
        def jitted():
            import jax

            return jax.jit(function, static_argnames=static_arguments)

        @functools.wraps(function)
        def call(*args, **kwargs):
            if keras.backend.backend() == "jax":
                return jitted()(*args, **kwargs)
            return function(*args, **kwargs)

        return call

    return decorate
