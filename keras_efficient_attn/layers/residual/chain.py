"""Keras layers in a reversible chain, with explicit weights, states and losses."""

import collections

import keras
from keras import ops

from keras_efficient_attn.ops.common.numerics import wide_dtype
from keras_efficient_attn.ops.reversible.api import Half, reversible_chain

Sublayer = collections.namedtuple("Sublayer", ["call", "layers", "tensors"])
Sublayer.__doc__ = """A function in a residual connection.

Attributes:
    call: Callable `(x, **tensors) -> (y, state)`; the state is `None` where the
        activations are rebuilt.
    layers: The Keras layers that it calls.
    tensors: Dict of the other tensors that it reads, which must not come from
        elsewhere.
"""


def stream_dtype(layer):
    """float32, or float64 for a layer that computes in it.

    Rebuilding subtracts the update: in half precision only rounding errors remain.
    """
    return wide_dtype(layer.compute_dtype)


def plain_residuals(sublayers, x1, x2):
    """`x1 + f(x2)`, `x2 + g(x1)`, … with all activations kept for the gradient.

    Returns:
        `(x1, x2, states)`: the streams, and a list of the sublayers' states.
    """
    streams, states = [x1, x2], []
    for i, sublayer in enumerate(sublayers):
        y, state = sublayer.call(streams[1 - i % 2], **sublayer.tensors)
        streams[i % 2] = streams[i % 2] + ops.cast(y, x1.dtype)
        states.append(state)
    return *streams, states


def reversible_residuals(owner, sublayers, x1, x2):
    """The streams of `plain_residuals`, with memory independent of the depth.

    State updates are assigned once, and the layers' losses are added to `owner`.

    Raises:
        ValueError: If a sublayer assigns to a variable that is not its own.
    """
    parameters, states, tensors = _Unique(), _Unique(), _Unique()
    halves = []
    for sublayer in sublayers:
        own = _Unique()
        for layer in sublayer.layers:
            own.add(layer.trainable_variables)
        trainable = list(own.items)
        own.add(v for layer in sublayer.layers for v in layer.variables)
        others = own.items[len(trainable) :]
        chosen = tensors.add(sublayer.tensors.values())
        halves.append(
            Half(
                _pure_function(sublayer, trainable, others, chosen),
                parameters.add(trainable),
                states.add(others),
            )
        )
    y1, y2, losses, updates = reversible_chain(
        halves,
        x1,
        x2,
        [ops.convert_to_tensor(variable) for variable in parameters.items],
        [ops.convert_to_tensor(variable) for variable in states.items],
        [ops.convert_to_tensor(tensor) for tensor in tensors.items],
    )
    for index, value in updates.items():
        states.items[index].assign(value)
    for loss in losses:
        owner.add_loss(loss)
    return y1, y2


def _pure_function(sublayer, trainable, others, chosen):
    own = {id(variable) for variable in (*trainable, *others)}

    def function(x, parameters, states, tensors):
        values = zip((*trainable, *others), (*parameters, *states), strict=True)
        scope = keras.StatelessScope(list(values), collect_losses=True)
        before = [scope.get_current_value(variable) for variable in others]
        with scope:
            own_tensors = (tensors[i] for i in chosen)
            y, _ = sublayer.call(
                x, **dict(zip(sublayer.tensors, own_tensors, strict=True))
            )
        foreign = set(scope.state_mapping) - own
        if foreign:
            raise ValueError(
                "A layer in a reversible stack must have all variables that it "
                "assigns to among its own, to run a second time from the same state. "
                f"Received: {sublayer.layers}, which assign to {len(foreign)} more "
                "(layers with random numbers need a `SeedGenerator` of their own)."
            )
        after = [scope.get_current_value(variable) for variable in others]
        updates = {
            i: new
            for i, (old, new) in enumerate(zip(before, after, strict=True))
            if new is not old
        }
        return ops.cast(y, x.dtype), updates, tuple(scope.losses)

    return function


class _Unique:
    """A list without repetitions, by identity."""

    def __init__(self):
        self.items, self._index = [], {}

    def add(self, items):
        """Adds new items; returns the indices of all items."""
        indices = []
        for item in items:
            if id(item) not in self._index:
                self._index[id(item)] = len(self.items)
                self.items.append(item)
            indices.append(self._index[id(item)])
        return tuple(indices)
