"""Attention layers by name: `"performer:feature_map=elu,num_features=64"`."""

import ast
import inspect
import re

from keras_efficient_attn.layers.attention.base import EfficientAttention

_LAYERS = {}


def register_attention(name):
    """Decorator: registers an attention layer by name.

    Backbones, `convert_backbone`, the benchmark command and `get_attention` find the
    layer by that name. For saved models, register the class with Keras as well.

    Args:
        name: String without a colon, such as `"performer"`.

    Raises:
        ValueError: If the name holds a colon or names another class.
        TypeError: If the class is not an `EfficientAttention`.

    Example:

    >>> from keras_efficient_attn import EfficientAttention
    >>> from keras_efficient_attn.layers import get_attention, register_attention
    >>> @register_attention("identity")
    ... class IdentityAttention(EfficientAttention):
    ...     def attend(self, query, key, value, call):
    ...         return value, None
    >>> get_attention("identity", num_heads=2, key_dim=8).num_heads
    2
    """
    if not isinstance(name, str) or not name or ":" in name:
        raise ValueError(
            "`name` must be a string without a colon, which separates options. "
            f"Received: name={name!r}"
        )

    def register(layer_class):
        if not (
            isinstance(layer_class, type)
            and issubclass(layer_class, EfficientAttention)
        ):
            raise TypeError(
                "An attention layer must be a subclass of `EfficientAttention`. "
                f"Received: {layer_class!r}"
            )
        add_named(_LAYERS, name, layer_class)
        return layer_class

    return register


def attention_names():
    """The names that `get_attention` knows, as a tuple."""
    return tuple(sorted(_LAYERS))


def attention_class(name):
    """The class for a name."""
    return _LAYERS[name]


def get_attention(identifier, **defaults):
    """Makes the attention layer for a name.

    Args:
        identifier: `"name"` or `"name:option=value,option=value"`, with a name from
            `attention_names()` and options of the layer's constructor.
        **defaults: Arguments of the constructor, such as `num_heads` and `key_dim`.
            Options in the identifier take precedence.

    Returns:
        A new layer.

    Raises:
        ValueError: For an unknown name or option, or options that the layer rejects.
        TypeError: If `identifier` is not a string.

    Example:

    >>> from keras_efficient_attn.layers import get_attention
    >>> layer = get_attention("performer:feature_map=elu", num_heads=4, key_dim=16)
    >>> layer.num_heads, layer.get_config()["feature_map"]
    (4, 'elu')
    """
    layer_class, options = parse_attention(identifier)
    try:
        return layer_class(**{**defaults, **options})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{identifier}: {' '.join(str(error).split())}") from error


def parse_attention(identifier):
    """The class for a name, and its options, as a dict.

    Raises:
        ValueError: For an unknown name or option.
        TypeError: If `identifier` is not a string.
    """
    if not isinstance(identifier, str):
        raise TypeError(
            "`identifier` must be a string, such as 'performer:feature_map=elu'. "
            f"Received: identifier={identifier!r}"
        )
    name, _, text = identifier.partition(":")
    if name not in _LAYERS:
        raise ValueError(
            f"`identifier` must be one of {', '.join(attention_names())}, with options "
            f"after a colon. Received: identifier={identifier!r}"
        )
    layer_class = _LAYERS[name]
    return layer_class, _parse_options(identifier, text, layer_class)


def _items(text):
    """The `option=value` of the text after the colon."""
    # A comma before `option=` ends an option; others are part of a value.
    return [item for item in re.split(r",(?=\w+=)", text) if item]


def _parse_options(identifier, text, layer_class):
    known = set(inspect.signature(layer_class).parameters) - {"kwargs"}
    options = {}
    for item in _items(text):
        name, given, value = item.partition("=")
        if not given or not value:
            raise ValueError(
                f"{identifier}: an option must have the form `name=value`. Received: "
                f"{item!r}"
            )
        if name in options:
            raise ValueError(
                f"{identifier}: give the option {name!r} once. Received: "
                f"{name}={options[name]!r} and {item}"
            )
        if name not in known:
            raise ValueError(
                f"{identifier}: there is no option {name!r}; choose from "
                f"{', '.join(sorted(known))}"
            )
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options


def add_named(classes, name, new):
    """Adds a class to a dict of classes by name.

    A class may be defined again, as in a notebook; it then replaces its old definition.

    Raises:
        ValueError: If another class has the name.
    """
    known = classes.get(name, new)
    if (known.__module__, known.__qualname__) != (new.__module__, new.__qualname__):
        raise ValueError(
            f"The name {name!r} is taken by {known.__name__}: choose another. "
            f"Received: {new.__name__}"
        )
    classes[name] = new
