"""Registries of classes by name."""


def add_named(classes, name, new):
    """Adds a class to a dict of classes by name.

    A class may be defined again, as in a notebook; it then replaces its old definition.

    Raises:
        ValueError: If another class has the name.
    """
    known = classes.get(name, new)
    if (known.__module__, known.__qualname__) != (new.__module__, new.__qualname__):
        raise ValueError(
            f"{name!r} names {known.__name__} already. Received: {new.__name__}"
        )
    classes[name] = new
