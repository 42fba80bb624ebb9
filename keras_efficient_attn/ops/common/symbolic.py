"""Public operations on symbolic tensors: nodes of Functional models."""

import inspect

import keras

# By name: a file names an operation, and must not name any other function.
FUNCTIONS = {}


def call_symbolically(function, args, kwargs):
    """The symbolic outputs of a function of `FUNCTIONS`."""
    arguments = inspect.signature(function).bind(*args, **kwargs).arguments
    callables = {n: arguments.pop(n) for n, x in [*arguments.items()] if callable(x)}
    outputs = FunctionOperation(function.__name__, callables)(**arguments)
    if isinstance(outputs, tuple) and len(outputs) == 1:
        # A feature map without a log scale.
        return *outputs, None
    return outputs


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class FunctionOperation(keras.Operation):
    """A node of a Functional model that calls a function of `keras_efficient_attn.ops`.

    Args:
        function: Name of the function.
        callables: Optional dict of the function's arguments that are functions.
        name: Optional name of the node.

    Raises:
        ValueError: If the function does not exist.
    """

    def __init__(self, function, callables=None, name=None):
        super().__init__(name=name)
        if function not in FUNCTIONS:
            raise ValueError(
                "`function` must be the name of an operation on tensors of "
                f"keras_efficient_attn.ops. Received: function={function!r}"
            )
        self.function = function
        self.callables = callables or {}

    def call(self, **arguments):
        outputs = FUNCTIONS[self.function](**self.callables, **arguments)
        if isinstance(outputs, tuple) and outputs[-1] is None:
            # The outputs of a node are tensors.
            return outputs[:-1]
        return outputs

    def get_config(self):
        return {
            "function": self.function,
            "callables": keras.saving.serialize_keras_object(self.callables),
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config):
        callables = keras.saving.deserialize_keras_object(config.get("callables"))
        return cls(**{**config, "callables": callables})
