"""Reversible residual blocks: activations are recomputed, not stored."""

import collections
import inspect
import itertools

import keras
from keras import ops

from keras_efficient_attn.layers.arguments import (
    build_layer,
    serialize_shared,
    spec_with_state,
)
from keras_efficient_attn.layers.keras_internals import (
    implicit_mask,
    without_autocast,
)
from keras_efficient_attn.layers.replicas import ReplicaLosses
from keras_efficient_attn.ops.common.checks import (
    check_bool,
    check_name,
)
from keras_efficient_attn.ops.common.numerics import wide_dtype
from keras_efficient_attn.ops.reversible.api import Half, reversible_chain

MERGES = ("mean", "concatenate")


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class ReversibleBlock(ReplicaLosses, keras.layers.Layer):
    """Two residual connections on two streams; outputs determine the inputs.

    ```
    y1 = x1 + f(x2)        x2 = y2 − g(y1)
    y2 = x2 + g(y1)        x1 = y1 − f(x2)
    ```

    The gradient runs `f` and `g` a second time, on rebuilt inputs: the block stores
    only its outputs. Put several blocks into one `ReversibleStack`, which stores only
    the last block's outputs.

    Put normalisation and dropout inside `f` and `g`. Both must preserve shapes, and
    give the same result when run twice from the same variables: draw random numbers
    from a `SeedGenerator` of the layer, as `keras.layers.Dropout` does. Updates of
    variables and `add_loss` are counted once. Gradients are of the first order.

    Args:
        f: Layer from `(batch, length, dim)` to the same shape, usually normalisation
            and attention, such as a Functional model. It receives `mask` and `state` if
            its call has these arguments.
        g: Layer as `f`, usually normalisation and a feed-forward network.
        reversible: Whether to rebuild activations. `False` gives the same numbers with
            all activations kept, as do calls with `state`. Defaults to `True`.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        inputs: Pair `(x1, x2)` of the same shape.
        mask: Optional boolean `(batch, length)`, for `f`; by default Keras' mask of
            `x2`, which both outputs also get.
        state: Optional state of `f`, which then returns `(output, state)`. Such a call
            keeps all activations for its gradient.
        training: Boolean. Only training calls rebuild.

    Returns:
        `(y1, y2)`, float32 or wider whatever the policy, because half precision is not
        enough to rebuild activations. `((y1, y2), state)` with `state`.

    Raises:
        TypeError: If `f` or `g` is not a layer.
        ValueError: If one of them assigns to a variable that is not its own, or a
            state is given to an `f` that takes none.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import PerformerAttention, ReversibleBlock
    >>> x = keras.Input((None, 16))
    >>> h = keras.layers.LayerNormalization()(x)
    >>> f = keras.Model(x, PerformerAttention(num_heads=2, key_dim=8)(h, h))
    >>> g = keras.Sequential(
    ...     [keras.layers.LayerNormalization(), keras.layers.Dense(16)]
    ... )
    >>> x = keras.random.normal((1, 10, 16))
    >>> y1, y2 = ReversibleBlock(f, g)((x, x))

    Reference:
        - [Gomez et al., 2017](https://arxiv.org/abs/1707.04585)
        - [Kitaev et al., 2020](https://arxiv.org/abs/2001.04451)
    """

    def __init__(self, f, g, reversible: bool = True, **kwargs):
        # autocast=False: streams stay float32 under a mixed policy.
        super().__init__(autocast=False, **kwargs)
        for name, layer in (("f", f), ("g", g)):
            if not isinstance(layer, keras.Layer):
                raise TypeError(f"`{name}` must be a layer. Received: {name}={layer!r}")
        self.f = f
        self.g = g
        check_bool("reversible", reversible)
        self.reversible = reversible
        self.supports_masking = True

    def build(self, input_shape):
        for layer in (self.f, self.g):
            build_layer(layer, input_shape[0], stream_dtype(self))

    def call(self, inputs, mask=None, state=None, training=None):
        mask = implicit_mask(inputs[1]) if mask is None else _mask_of_f(mask)
        x1, x2 = (ops.cast(x, stream_dtype(self)) for x in inputs)
        if state is None:
            return _run(self, [self], x1, x2, mask, None, training)
        streams, (state,) = _run(self, [self], x1, x2, mask, [state], training)
        return streams, state

    def compute_mask(self, inputs, previous_mask):
        return (_mask_of_f(previous_mask),) * 2

    def compute_output_spec(self, inputs, mask=None, state=None, training=None):
        outputs = tuple(
            keras.KerasTensor(x.shape, dtype=stream_dtype(self)) for x in inputs
        )
        return spec_with_state(outputs, state)

    def get_config(self):
        return {
            **super().get_config(),
            "f": serialize_shared(self.f),
            "g": serialize_shared(self.g),
            "reversible": self.reversible,
        }

    @classmethod
    def from_config(cls, config):
        layers = {
            name: keras.saving.deserialize_keras_object(config[name])
            for name in ("f", "g")
        }
        return super().from_config({**config, **layers})


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class ReversibleStack(ReplicaLosses, keras.layers.Layer):
    """A sequence of reversible blocks, with memory independent of their number.

    ```
    x1 = x2 = x
    for each block: x1, x2 = block(x1, x2)
    y = (x1 + x2) / 2
    ```

    All blocks share one gradient function. It stores the last two streams, the seeds
    and other states before each block, the hash buckets of `ReformerLSHAttention` (per
    block, position, head and round one byte, or four for more than 256 buckets) and the
    hard codes of `VQAttention` (four bytes per block, position and head). It rebuilds
    the rest from the last block to the first. A step costs one additional forward pass.

    Args:
        blocks: List of `ReversibleBlock`. A block may occur more than once.
        merge: `"mean"` (the default) or `"concatenate"`, for twice the dim.
        reversible: Whether to rebuild activations. `False` gives the same numbers with
            all activations kept. A block with `reversible=False` keeps its own
            activations, and its neighbours then store two streams each. Defaults to
            `True`.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: `(batch, length, dim)`.
        mask: Optional boolean `(batch, length)`, for each `f`.
        state: Optional, from `get_initial_state` or the previous segment's call.
            Such a call keeps all activations for its gradient.
        training: Boolean. Only training calls rebuild.

    Returns:
        `(batch, length, dim)`, or `2 · dim`; `(output, state)` with `state`.

    Raises:
        TypeError: If one of `blocks` is not a `ReversibleBlock`.
        ValueError: If there are none, or for an unknown `merge`.

    Example:

    ```python
    import keras
    from keras_efficient_attn import (
        ReformerLSHAttention,
        ReversibleBlock,
        ReversibleStack,
    )

    def block(dim):
        x = keras.Input((None, dim))
        h = keras.layers.LayerNormalization()(x)
        attention = ReformerLSHAttention(num_heads=4, key_dim=dim // 4)
        h = attention(h, h, use_causal_mask=True)
        f = keras.Model(x, h)
        g = keras.Sequential(
            [
                keras.layers.LayerNormalization(),
                keras.layers.Dense(4 * dim, "relu"),
                keras.layers.Dense(dim),
            ]
        )
        return ReversibleBlock(f, g)

    stack = ReversibleStack([block(64) for _ in range(6)])
    y = stack(keras.random.normal((2, 1000, 64)), training=True)
    ```

    Reference:
        - [Kitaev et al., 2020](https://arxiv.org/abs/2001.04451)
    """

    def __init__(self, blocks, merge: str = "mean", reversible: bool = True, **kwargs):
        super().__init__(autocast=False, **kwargs)
        self.blocks = list(blocks)
        for block in self.blocks:
            if not isinstance(block, ReversibleBlock):
                raise TypeError(
                    "`blocks` must be a list of `ReversibleBlock`. Received: "
                    f"blocks={blocks!r}"
                )
        if not self.blocks:
            raise ValueError("`blocks` must not be empty. Received: blocks=[]")
        check_name("merge", merge, MERGES)
        self.merge = merge
        check_bool("reversible", reversible)
        self.reversible = reversible
        self.supports_masking = True

    def build(self, x_shape):
        for block in self.blocks:
            if not block.built:
                block.build([x_shape, x_shape])

    def get_initial_state(self, batch_size, max_length=None):
        """The state before the first position: the state of each block's `f`.

        Each `f` must have such a method.

        Args:
            batch_size: Rows in the batch.
            max_length: Positions that the states can hold, for layers `f` whose state
                grows; passed to their methods if given. Defaults to `None`.
        """
        lengths = () if max_length is None else (max_length,)
        return {
            f"block_{i}": block.f.get_initial_state(batch_size, *lengths)
            for i, block in enumerate(self.blocks)
        }

    def call(self, x, mask=None, state=None, training=None):
        mask = implicit_mask(x) if mask is None else mask
        x = ops.cast(x, stream_dtype(self))
        names = [f"block_{i}" for i in range(len(self.blocks))]
        states = None if state is None else [state[name] for name in names]
        streams = _run(self, self.blocks, x, x, mask, states, training)
        if state is not None:
            streams, states = streams
            states = dict(zip(names, states, strict=True))
        output = merge_streams(*streams, self.merge)
        output = ops.cast(output, self.compute_dtype)
        return output if state is None else (output, states)

    def compute_output_spec(self, x, mask=None, state=None, training=None):
        dim = x.shape[-1] * (2 if self.merge == "concatenate" else 1)
        output = keras.KerasTensor((*x.shape[:-1], dim), dtype=self.compute_dtype)
        return spec_with_state(output, state)

    def get_config(self):
        unique = []
        for block in self.blocks:
            if block not in unique:
                unique.append(block)
        return {
            **super().get_config(),
            "blocks": [serialize_shared(block) for block in unique],
            "order": [unique.index(block) for block in self.blocks],
            "merge": self.merge,
            "reversible": self.reversible,
        }

    @classmethod
    def from_config(cls, config):
        config = dict(config)
        blocks = keras.saving.deserialize_keras_object(config["blocks"])
        config["blocks"] = [blocks[i] for i in config.pop("order")]
        return super().from_config(config)


def merge_streams(x1, x2, merge):
    """One tensor from two streams."""
    if merge == "concatenate":
        return ops.concatenate([x1, x2], axis=-1)
    return (x1 + x2) / 2


def _run(owner, blocks, x1, x2, mask, states, training):
    """The streams after the blocks; with `states`, `(streams, states)`."""
    halves = []
    for i, block in enumerate(blocks):
        state = None if states is None else states[i]
        f = _first(block.f, mask, state, training)
        g = Sublayer(
            lambda x, g=block.g: (g(x, training=training), None), (block.g,), {}
        )
        rebuild = bool(
            owner.reversible and block.reversible and training and states is None
        )
        halves += [(rebuild, f), (rebuild, g)]
    new_states = []
    for rebuild, part in itertools.groupby(halves, key=lambda half: half[0]):
        sublayers = [sublayer for _, sublayer in part]
        if rebuild:
            x1, x2 = reversible_residuals(owner, sublayers, x1, x2)
        else:
            x1, x2, made = plain_residuals(sublayers, x1, x2)
            # States of `f`; `g` has none.
            new_states += made[::2]
    return (x1, x2) if states is None else ((x1, x2), new_states)


def _mask_of_f(mask):
    """The mask that `f` reads, if each stream has a mask."""
    return mask[1] if isinstance(mask, list | tuple) else mask


def _first(f, mask, state, training):
    accepted = inspect.signature(f.call).parameters
    if state is not None and "state" not in accepted:
        raise ValueError(
            "`state` needs an `f` whose `call` has an argument `state`. Received: "
            f"f={f}"
        )

    def call(x, **tensors):
        if state is None:
            return f(x, training=training, **tensors), None
        return f(x, training=training, state=state, **tensors)

    tensors = {"mask": mask} if mask is not None and "mask" in accepted else {}
    return Sublayer(call, (f,), tensors)


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
    with without_autocast():
        given = [
            [ops.convert_to_tensor(x) for x in found.items]
            for found in (parameters, states, tensors)
        ]
    y1, y2, losses, updates = reversible_chain(halves, x1, x2, *given)
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
        # The second run is outside of all scopes.
        with scope, without_autocast():
            own_tensors = (tensors[i] for i in chosen)
            y, _ = sublayer.call(
                x, **dict(zip(sublayer.tensors, own_tensors, strict=True))
            )
        foreign = set(scope.state_mapping) - own
        if foreign:
            raise ValueError(
                "A layer in a reversible stack may assign to its own variables only, "
                "because it runs a second time in the backward pass. Received: "
                f"{sublayer.layers}, which assign to {len(foreign)} other variables "
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
