"""Arguments of layers, which their configurations repeat."""

import keras


class KeepsArguments:
    """Mixin of a Keras layer whose arguments are attributes and entries of the config.

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
