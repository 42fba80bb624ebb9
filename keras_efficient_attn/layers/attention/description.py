"""What an attention layer says of itself, to whoever builds or replaces layers."""

import inspect

import keras
import numpy as np

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def constructor_signature(layer_class):
    """The signature of a layer's constructor, with the arguments of its base classes
    that it accepts.

    Those of `keras.layers.MultiHeadAttention` come first, in its order, and may be
    given by position; `**kwargs` stands for those of `keras.layers.Layer`.
    """
    last = layer_class.__mro__.index(keras.layers.MultiHeadAttention)
    keras_own, own = {}, {}
    for parent in reversed(layer_class.__mro__[: last + 1]):
        if "__init__" not in vars(parent):
            continue
        _, *parameters = inspect.signature(parent.__init__).parameters.values()
        named = {p.name: p for p in parameters if p.kind not in _VARIADIC}
        if parent is keras.layers.MultiHeadAttention:
            keras_own = named
            continue
        for name, parameter in named.items():
            if name in keras_own:
                keras_own[name] = keras_own[name].replace(default=parameter.default)
        new = {name: p for name, p in named.items() if name not in keras_own}
        # The arguments of the class itself come before those of its base classes.
        own = new | {name: p for name, p in own.items() if name not in new}
    for name in layer_class.refused_arguments:
        own.pop(name, None)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [
            *keras_own.values(),
            *(parameter.replace(kind=keyword) for parameter in own.values()),
            inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
        ]
    )


class LayerDescription:
    """Mixin of `EfficientAttention`: what a layer can do, with defaults for all.

    The signature of a subclass, which `help` and editors show, has all arguments.
    """

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.__signature__ = constructor_signature(cls)

    # Arguments of base classes that the layer refuses; the signature omits them.
    refused_arguments = ()
    # Layers set these for the class, or override them by properties:
    # whether masked positions of a whole sequence keep their places, as in an image.
    # Otherwise, and in a segment with a state, they do not exist: positions count what
    # is left.
    keeps_places = False
    # Whether the layer keeps apart the documents of a row, `call.documents`.
    takes_documents = False
    # Whether the state holds the layer's inputs, as in Transformer-XL.
    remembers_inputs = False
    # Whether outputs estimate softmax attention with the same weights.
    estimates_softmax = False
    # Whether outputs are softmax attention over keys that the layer selects.
    is_softmax = False
    # Whether `calibrate(data)` fits the layer to data without training.
    can_calibrate = False
    # Whether `calibrate` fits to the keys beyond the `window`.
    calibrates_beyond_window = False
    # Whether keys beyond a `window` are estimated; without it, all keys are.
    estimates_beyond_window = False
    # Whether the layer has a window, and adds its `window_bias` there.
    takes_window_bias = False
    # Whether the layer shares weights with the other layers of its stack.
    shares_with_blocks = False
    # Whether `share_weights_with` was called by nothing that calls it again on loading.
    shares_unsaved = False

    @classmethod
    def conversion_refusal(cls, options):
        """Why such a layer cannot take the place of trained softmax attention, if so.

        Args:
            options: Dict of arguments of the constructor.
        """
        return None

    def split_reach(self, call):
        """How many keys before a query it sees, where a sequence is split over devices.

        Args:
            call: `AttentionCall` without a state.

        Returns:
            Integer: the number of keys of the device before that a device needs beside
            the sums; or `None` for a layer that is not split.

        Raises:
            ValueError: For a call that cannot be split.
        """
        return None

    def share_weights_with(self, other):
        """Uses another layer's weights for those that `shares_with_blocks` refers to.

        Args:
            other: A layer of the same class and sizes. This layer must not be built.
        """
        raise NotImplementedError

    def operations(self, length, causal):
        """Useful operations between the projections, for one row of self-attention.

        A multiplication and an addition are two operations. Counts the matrix products
        of the definition.

        Args:
            length: Positions.
            causal: Whether query `t` sees keys `0..t` only.

        Returns:
            Number of operations, or `None` for a layer without a count.
        """
        return None

    def softmax_logits(self, query, key, positions, causal):
        """The logits of the softmax attention to compare the layer with.

        Args:
            query, key: Arrays `(..., query_length, key_dim)` and `(..., key_length,
                key_dim)` of one head, projected.
            positions: Integers `(query_length,)`: the queries' positions.
            causal: Whether a query sees no later keys.

        Returns:
            Array `(..., query_length, key_length)`, −inf for keys not seen.
        """
        logits = self._key_dim**-0.5 * query @ np.swapaxes(key, -1, -2)
        hidden = causal & (np.arange(key.shape[-2]) > positions[:, None])
        return np.where(hidden, -np.inf, logits)
