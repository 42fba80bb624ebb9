"""What layers share: arguments that configurations repeat, and weights they hold."""

import keras
from keras import ops


class KeepsArguments:
    """Mixin of a Keras class whose arguments are attributes and entries of the config.

    Place it before the class of Keras among the bases.
    """

    _kept_arguments = ()

    def keep(self, arguments, omit=()):
        """Sets arguments of the constructor as attributes; `get_config` returns them.

        `get_config` reads the attributes when it is called, so that they may change.

        Args:
            arguments: Dict of values that JSON can hold; `locals()` in the constructor
                gives all of its arguments.
            omit: Names of arguments and local variables that are not kept.
        """
        omit = {"self", "args", "kwargs", "__class__", *omit}
        names = tuple(name for name in arguments if name not in omit)
        for name in names:
            setattr(self, name, arguments[name])
        self._kept_arguments = (*self._kept_arguments, *names)

    def kept_arguments(self):
        """The current values of the arguments, by name."""
        return {name: getattr(self, name) for name in self._kept_arguments}

    def get_config(self):
        return {**super().get_config(), **self.kept_arguments()}


def activation_of(argument, identifier):
    """The activation function for an identifier, or `None`.

    Raises:
        ValueError: If it is neither a function nor a name that Keras knows.
    """
    if identifier is None:
        return None
    try:
        return keras.activations.get(identifier)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`{argument}` must name an activation, or be a function or None. "
            f"Received: {argument}={identifier!r}"
        ) from error


def serialize_shared(layer):
    """The configuration of a layer that several layers of a file may share.

    Keras' own marker is lost when a nested configuration is copied, and the layers of a
    loaded model would no longer share.
    """
    config = keras.saving.serialize_keras_object(layer)
    return {**config, "shared_object_id": id(layer)}


def dense_layer(units, dtype, use_bias=True, **options):
    """A dense layer, of one of the classes that Keras quantises: not a subclass.

    Args:
        units: Width of the outputs.
        dtype: Policy.
        use_bias: Whether there is a bias.
        **options: Arguments that `Dense` and `EinsumDense` share.
    """
    if keras.dtype_policies.get(dtype).compute_dtype != "float64":
        return keras.layers.Dense(units, use_bias=use_bias, dtype=dtype, **options)
    # On PyTorch `Dense` computes in float32 for float64.
    return keras.layers.EinsumDense(
        "...a,ab->...b",
        output_shape=units,
        bias_axes="b" if use_bias else None,
        dtype=dtype,
        **options,
    )


def build_layer(layer, shape, dtype):
    """Builds a layer with one input, and its sublayers.

    If a layer does not define `build`, Keras builds its sublayers by tracing a call.
    The inherited `build` would only mark it as built; the first call would then create
    the variables inside a gradient, which would miss them.
    """
    if layer.built:
        return
    if type(layer).build is keras.Layer.build:
        layer(keras.KerasTensor(shape, dtype=dtype))
    else:
        layer.build(shape)


def spec_with_state(output, state):
    """What a symbolic call returns: `output`, or `(output, state)` with a state.

    The new state has the shapes and dtypes of the state that the call received.

    Args:
        output: `KerasTensor`, or a nest of them.
        state: The call's `state`, a nest of tensors, or `None`.
    """
    if state is None:
        return output
    # New tensors: Keras notes in each output which layer it is from.
    return output, keras.tree.map_structure(
        lambda x: keras.KerasTensor(x.shape, dtype=x.dtype), state
    )


def add_counter(layer, name):
    """A weight of a layer that counts its calls, from 0 on."""
    return layer.add_weight(
        name=name,
        shape=(),
        dtype="int32",
        initializer="zeros",
        trainable=False,
        autocast=False,
        aggregation="only_first_replica",
    )


def identity(shape, dtype=None):
    """Initializer of `(..., dim, dim)`: identity matrices."""
    return ops.zeros(shape, dtype) + ops.eye(shape[-1], dtype=dtype)
