"""Groups of options, passed as one argument."""

import dataclasses


class Options:
    """Base of frozen dataclasses of options.

    The first field is the shorthand: its value alone means options with this value and
    the defaults of the other fields.
    """

    @classmethod
    def get(cls, identifier):
        """The options for an argument.

        Args:
            identifier: An instance, the value of its first field, or a dict of fields,
                such as from `get_config`.

        Raises:
            ValueError: If a field does not exist, or its value is out of range.
        """
        if isinstance(identifier, cls):
            return identifier
        if not isinstance(identifier, dict):
            return cls(identifier)
        known = [field.name for field in dataclasses.fields(cls)]
        for name in identifier:
            if name not in known:
                raise ValueError(
                    f"{cls.__name__} has the fields {', '.join(known)}. Received: "
                    f"{name}={identifier[name]!r}"
                )
        return cls(**identifier)

    def get_config(self):
        """A dict of all fields, for JSON."""
        return {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }


def check_name(argument, received, names):
    """Raises `ValueError` if an argument is not one of these names."""
    if received not in names:
        raise ValueError(
            f"`{argument}` must be one of {', '.join(names)}. Received: "
            f"{argument}={received!r}"
        )
