"""How the tensors of a checkpoint stand to the variables of a backbone."""

import dataclasses
import functools
import math

import keras
import numpy as np
from keras import ops

from keras_efficient_attn.layers.keras_internals import set_initializer


@dataclasses.dataclass(frozen=True)
class Weight:
    """A tensor of a checkpoint and its variable.

    Attributes:
        names: The names that the tensor may have; the first is the one to write.
        target: The variable, or the dense layer whose kernel it is.
        shape: The tensor's shape.
        transposed: Whether its axes are in the reverse order.
    """

    names: tuple
    target: object
    shape: tuple
    transposed: bool = False

    @property
    def value(self):
        """The variable; of a layer with LoRA, the tensor with the update."""
        is_layer = isinstance(self.target, keras.layers.Layer)
        return self.target.kernel if is_layer else self.target

    def defer(self, read):
        """Lets a variable without a value begin with the tensor.

        Args:
            read: Function that returns the tensor, a NumPy array.
        """
        variable = self.value

        def initial_value(shape, dtype, layout=None):
            tensor = read()
            tensor = tensor.T if self.transposed else tensor
            tensor = tensor.reshape(shape).astype(dtype, order="C", copy=False)
            tensor = ops.convert_to_tensor(tensor, dtype)
            if layout is None:
                return tensor
            # The one that Keras passes on JAX has a mesh without devices.
            layout = keras.distribution.distribution().get_variable_layout(variable)
            return keras.distribution.distribute_tensor(tensor, layout)

        set_initializer(variable, initial_value)

    def read(self):
        """The tensor, a NumPy array, from the variable."""
        array = ops.convert_to_numpy(self.value)
        if not self.transposed:
            return array.reshape(self.shape)
        return np.ascontiguousarray(array.reshape(self.shape[::-1]).T)


def plain(names, variable, shape=None):
    """A `Weight` with the same order of axes; `shape` defaults to one axis."""
    shape = shape or (math.prod(variable.shape),)
    return Weight(_names(names), variable, tuple(shape))


def matrix(names, layer, input_axes=1):
    """A `Weight` of a dense layer's kernel, or of a matrix.

    Args:
        names: As in `Weight`, or a single one.
        layer: The layer, or a variable.
        input_axes: How many of the kernel's axes are those of the input.
    """
    kernel = layer.kernel if isinstance(layer, keras.layers.Layer) else layer
    shape = tuple(kernel.shape)
    rows, columns = math.prod(shape[input_axes:]), math.prod(shape[:input_axes])
    return Weight(_names(names), layer, (rows, columns), transposed=True)


def convolution(names, kernel):
    """A `Weight` of a depthwise convolution, `(channels, 1, positions)`."""
    size, *channels = kernel.shape
    shape = (math.prod(channels), 1, size)
    return Weight(_names(names), kernel, shape, transposed=True)


def load_weights(weights, files, ignored=()):
    """Checks names and shapes; `deferred_variables` then reads the tensors.

    Args:
        weights: List of `Weight`.
        files: `TensorFiles`, or an object with the same methods.
        ignored: Names of tensors that the model does not read.

    Raises:
        ValueError: If a tensor is missing, left over, or of another shape.
    """
    found = {}
    for weight in weights:
        name = next((name for name in weight.names if name in files.names), None)
        if name is None:
            raise ValueError(
                f"The checkpoint must have a tensor {' or '.join(weight.names)} of "
                f"shape {weight.shape}. Received: {len(files.names)} others"
            )
        if files.shape(name) != weight.shape:
            raise ValueError(
                f"{name} of the checkpoint must have the shape {weight.shape}, as its "
                f"config.json says. Received: {files.shape(name)}"
            )
        found[name] = weight
    known = {name for weight in weights for name in weight.names}
    left = files.names - known - set(ignored)
    if left:
        raise ValueError(
            "The model has no counterpart for these tensors of the checkpoint: check "
            "`model_type` and the options of config.json. Received: "
            f"{', '.join(sorted(left))}"
        )
    for name, weight in found.items():
        weight.defer(functools.partial(files.read, name))


def _names(names):
    return (names,) if isinstance(names, str) else tuple(names)
