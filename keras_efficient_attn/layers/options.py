"""Groups of options, passed as one argument."""

import dataclasses
import typing

from keras_efficient_attn.ops.common.checks import (
    check_any_int,
    check_bool,
    check_number,
)


class Options:
    """Base of frozen dataclasses of options.

    The first field is the shorthand: its value alone means options with this value and
    the defaults of the other fields.
    """

    def __post_init__(self):
        """Raises `ValueError` for a field that is not of its annotated type."""
        checks = {bool: check_bool, int: check_any_int, float: check_number}
        for name, hint in typing.get_type_hints(type(self)).items():
            kinds = typing.get_args(hint) or (hint,)
            if kinds[0] in checks:
                optional = type(None) in kinds
                checks[kinds[0]](name, getattr(self, name), optional)

    @classmethod
    def get(cls, argument, identifier):
        """The options for an argument.

        Args:
            argument: Its name.
            identifier: An instance, the value of its first field, or a dict of fields,
                such as from `get_config`.

        Raises:
            ValueError: If a field does not exist, or its value is out of range.
        """
        if isinstance(identifier, cls):
            return identifier
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(identifier, dict):
            identifier = {known[0]: identifier}
        for name in identifier:
            if name not in known:
                raise ValueError(
                    f"`{argument}` has only the fields {', '.join(known)}. Received: "
                    f"{name}={identifier[name]!r}"
                )
        first = dataclasses.fields(cls)[0]
        if first.default is dataclasses.MISSING and first.name not in identifier:
            raise ValueError(
                f"`{argument}` must have the field {first.name}. Received: "
                f"{argument}={identifier!r}"
            )
        try:
            return cls(**identifier)
        except ValueError as error:
            raise ValueError(f"`{argument}`: {error}") from error

    def get_config(self):
        """A dict of all fields, for JSON."""
        return {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
