"""Classes that are known by names."""


def add_named(classes, name, new):
    """Puts a class into a dict of classes by name.

    A class may be defined again, as in a notebook, and then takes its own place.

    Raises:
        ValueError: If the name is another class'.
    """
    known = classes.get(name, new)
    if (known.__module__, known.__qualname__) != (new.__module__, new.__qualname__):
        raise ValueError(
            f"{name!r} names {known.__name__} already. Received: {new.__name__}"
        )
    classes[name] = new
