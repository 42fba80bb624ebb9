"""TensorFlow: a function compiled by XLA, or a graph where XLA refuses it."""

import tensorflow as tf

from keras_efficient_attn.benchmark.execution import is_float
from keras_efficient_attn.benchmark.memory import peak_increase, temporary_bytes

# TensorFlow raises these if XLA lacks a kernel or a constant that it needs.
XLA_ERRORS = (
    tf.errors.InvalidArgumentError,
    tf.errors.UnimplementedError,
    tf.errors.NotFoundError,
)


class Program:
    """See `keras_efficient_attn.benchmark.execution`."""

    def __init__(
        self, function, trainable=(), fixed=(), gradients=False, optimizer=None
    ):
        self._function = function
        self._trainable = [variable.value for variable in trainable]
        self._optimizer = optimizer
        self._body = self._differentiate if gradients else function
        self._compiled = None
        self.execution = "XLA"

    def __call__(self, *inputs):
        if self._compiled is not None:
            return self._compiled(*inputs)
        self._compiled = tf.function(self._body, jit_compile=True, autograph=False)
        try:
            return self._compiled(*inputs)
        except XLA_ERRORS:
            self.execution = "graph"
            self._compiled = tf.function(self._body, autograph=False)
            return self._compiled(*inputs)

    def _differentiate(self, cotangent, *inputs):
        floats = [x for x in inputs if is_float(x)]
        with tf.GradientTape() as tape:
            tape.watch(floats)
            output = self._function(*inputs)
        gradients = tape.gradient(
            output,
            floats + self._trainable,
            cotangent,
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        # An embedding's gradient holds a few rows; a training step needs all rows.
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        grad_inputs, grad_weights = gradients[: len(floats)], gradients[len(floats) :]
        if self._optimizer is None:
            return [output, *grad_inputs, *grad_weights]
        self._optimizer.apply(grad_weights)
        return [output, *grad_inputs]


def wait(outputs):
    tf.test.experimental.sync_devices()


def peak_memory(program, inputs):
    if not _on_gpu():
        temporaries = temporary_bytes() if program.execution == "XLA" else None
        if temporaries is not None:
            return temporaries, "XLA temporaries"
        return peak_increase(lambda: wait(program(*inputs))), "resident increase"
    tf.config.experimental.reset_memory_stats("GPU:0")
    wait(program(*inputs))
    return tf.config.experimental.get_memory_info("GPU:0")["peak"], "device"


def device():
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return "cpu"
    details = tf.config.experimental.get_device_details(gpus[0])
    return f"gpu: {details.get('device_name', 'unknown')}"


def _on_gpu():
    return bool(tf.config.list_logical_devices("GPU"))
