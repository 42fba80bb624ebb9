"""Position-wise layers, computed in slices of the sequence."""

import keras
import numpy as np
from keras import ops

from keras_efficient_attn.layers.arguments import (
    KeepsArguments,
    build_layer,
    serialize_shared,
)
from keras_efficient_attn.ops.chunked_cross_entropy import chunked_cross_entropy
from keras_efficient_attn.ops.common.backend import is_traced, shape_of
from keras_efficient_attn.ops.common.checks import (
    check_any_int,
    check_bool,
    check_positive_int,
)
from keras_efficient_attn.ops.common.chunking import chunk_count, pad_to
from keras_efficient_attn.ops.common.numerics import wide_dtype
from keras_efficient_attn.ops.common.scan import recompute_scan


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class ChunkedFeedForward(KeepsArguments, keras.layers.Layer):
    """A feed-forward network, computed in slices and recomputed for the gradient.

    ```
    y[slice] = feed_forward(x[slice])
    ```

    The wide activations inside the network exist for one slice at a time, in both
    passes: `batch · chunk_size · hidden_dim` floats instead of `batch · length ·
    hidden_dim`. The gradient costs one additional forward pass.

    Args:
        feed_forward: Layer from `(batch, length, dim)` to `(batch, length, output_dim)`
            that works on each position alone, such as a `Sequential` of `Dense` layers.
            It may have dropout, whose random numbers each slice draws for itself, and
            again for the gradient; it has no other states that it updates, and no
            losses.
        chunk_size: Positions of a slice. Defaults to 128.
        **kwargs: Those of `keras.layers.Layer`.

    Call arguments:
        x: `(batch, length, dim)`.
        training: Boolean.

    Returns:
        The output of `feed_forward` on the whole sequence.

    Raises:
        TypeError: If `feed_forward` is not a layer.
        ValueError: If `chunk_size` is not a positive integer; on a call, if the layer
            updates a variable (other than a seed) or adds a loss.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import ChunkedFeedForward
    >>> network = keras.Sequential(
    ...     [keras.layers.Dense(256, "gelu"), keras.layers.Dense(64)]
    ... )
    >>> ChunkedFeedForward(network)(keras.random.normal((2, 1000, 64))).shape
    (2, 1000, 64)

    Reference:
        - [Kitaev et al., 2020](https://arxiv.org/abs/2001.04451)
    """

    def __init__(self, feed_forward, chunk_size: int = 128, **kwargs):
        # autocast=False: the network casts its inputs and weights itself.
        super().__init__(autocast=False, **kwargs)
        if not isinstance(feed_forward, keras.Layer):
            raise TypeError(
                "`feed_forward` must be a layer. Received: "
                f"feed_forward={feed_forward!r}"
            )
        check_positive_int("chunk_size", chunk_size)
        self.keep(locals())
        self.supports_masking = True
        # JAX compiles the loop once per function.
        self._steps = {
            training: self._make_step(training) for training in (False, True)
        }

    def build(self, x_shape):
        build_layer(self.feed_forward, x_shape, self.compute_dtype)
        self._seeds = None
        if any(_is_seed(variable) for variable in self.feed_forward.variables):
            # It counts the calls; the network's own seeds are in its variables.
            self._seeds = keras.random.SeedGenerator(0)

    def call(self, x, training=None):
        length = shape_of(x)[1]
        chunk_size = self.chunk_size
        if isinstance(length, int):
            chunk_size = max(1, min(chunk_size, length))
        chunks = chunk_count(length, chunk_size)
        values = tuple(
            ops.convert_to_tensor(variable) for variable in self.feed_forward.variables
        )
        step = self._steps[bool(training)]
        xs = (pad_to(x, chunks * chunk_size),)
        if training and self._seeds is not None:
            values = (*values, self._seeds.next()[1])
            # The first position of a slice, as a float: steps read no integers.
            positions = ops.arange(chunks * chunk_size, dtype="float32")
            xs = (*xs, positions[None])
        _, (y,) = recompute_scan(
            step, (), xs, values, num_steps=chunks, step_size=chunk_size
        )
        return y[:, :length]

    def _make_step(self, training):
        def step(carry, x, values):
            variables = self.feed_forward.variables
            values = list(values)
            if len(values) > len(variables):
                calls = values.pop()
                values = [
                    _seeds_of_slice(value, calls, x[1][0, 0])
                    if _is_seed(variable)
                    else value
                    for variable, value in zip(variables, values, strict=True)
                ]
            mapping = list(zip(variables, values, strict=True))
            scope = keras.StatelessScope(mapping, collect_losses=True)
            before = dict(scope.state_mapping)
            with scope:
                y = self.feed_forward(x[0], training=training)
            seed_keys = {id(variable) for variable in variables if _is_seed(variable)}
            changed = any(
                new is not before.get(key) and key not in seed_keys
                for key, new in scope.state_mapping.items()
            )
            if changed or scope.losses:
                raise ValueError(
                    "`feed_forward` is computed in slices: it must not update "
                    "variables (other than the seeds of dropout) or add losses. "
                    f"Received: feed_forward={self.feed_forward}"
                )
            return carry, (y,)

        return step

    def compute_output_spec(self, x, training=None):
        return self.feed_forward.compute_output_spec(x)

    def get_config(self):
        return {
            **super().get_config(),
            "feed_forward": serialize_shared(self.feed_forward),
        }

    @classmethod
    def from_config(cls, config):
        feed_forward = keras.saving.deserialize_keras_object(config["feed_forward"])
        return super().from_config({**config, "feed_forward": feed_forward})


# Odd numbers below 2³¹ without a simple ratio: their multiples differ, modulo 2³², from
# slice to slice and from call to call.
SLICE_MIXER, CALL_MIXER = 1_640_531_527, 1_540_483_477


def _is_seed(variable):
    return variable.name == "seed_generator_state"


def _seeds_of_slice(state, calls, position):
    """The state of a layer's random numbers in one slice.

    Args:
        state: `(2,)`, the layer's own, the same in all calls.
        calls: The number of earlier calls.
        position: The first of the slice, a float.
    """
    dtype = keras.backend.standardize_dtype(state.dtype)
    # Integers wrap around.
    first = state[0] + CALL_MIXER * calls + SLICE_MIXER * ops.cast(position, dtype)
    return ops.stack([first, state[1]])


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class ChunkedVocabularyLoss(KeepsArguments, keras.layers.Layer):
    """Fused output projection and cross-entropy, in slices of the sequence.

    ```
    loss[t] = -log softmax(hidden[t] W + b)[label[t]]
    ```

    Neither pass holds all logits, `length · vocabulary_size` per row.

    Args:
        vocabulary_size: Number of classes.
        use_bias: Whether the projection has the bias b. Defaults to `True`.
        chunk_size: Positions per slice. Defaults to 128.
        ignore_class: Integer: the label of positions whose loss is 0, such as -100.
            Defaults to `None`: none.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        hidden: `(batch, length, dim)`.
        labels: Integers `(batch, length)`, from 0 to `vocabulary_size - 1` or
            `ignore_class`.

    Returns:
        `(batch, length)`, float32 or wider, in nats. In a compiled program, NaN for
        labels that are no class.

    Raises:
        ValueError: If an argument is not such an integer; eagerly, for a label that is
            no class.

    Example:

    A model whose output is its loss:

    ```python
    import keras
    from keras_efficient_attn import ChunkedVocabularyLoss

    tokens, labels = (keras.Input((None,), dtype="int32") for _ in range(2))
    hidden = keras.layers.Embedding(50_000, 64)(tokens)
    losses = ChunkedVocabularyLoss(50_000)(hidden, labels)
    model = keras.Model([tokens, labels], losses)
    model.compile("adam", lambda _, losses: losses)
    ```

    Reference:
        - [Kitaev et al., 2020](https://arxiv.org/abs/2001.04451)
    """

    def __init__(
        self,
        vocabulary_size,
        use_bias: bool = True,
        chunk_size: int = 128,
        ignore_class: int | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_positive_int("vocabulary_size", vocabulary_size)
        check_bool("use_bias", use_bias)
        check_positive_int("chunk_size", chunk_size)
        check_any_int("ignore_class", ignore_class, optional=True)
        self.keep(locals())

    def build(self, hidden_shape, labels_shape=None):
        self.kernel = self.add_weight(
            name="kernel", shape=(hidden_shape[-1], self.vocabulary_size)
        )
        self.bias = None
        if self.use_bias:
            self.bias = self.add_weight(
                name="bias", shape=(self.vocabulary_size,), initializer="zeros"
            )

    def logits(self, hidden):
        """All logits, for prediction: `(batch, length, vocabulary_size)`.

        In float32 or wider, like the loss.
        """
        logits = ops.cast(hidden, self.compute_dtype) @ ops.cast(
            self.kernel, self.compute_dtype
        )
        logits = ops.cast(logits, wide_dtype(self.compute_dtype))
        return logits if self.bias is None else logits + self.bias

    def call(self, hidden, labels):
        self._check_labels(labels)
        return chunked_cross_entropy(
            ops.cast(hidden, self.compute_dtype),
            ops.convert_to_tensor(self.kernel),
            None if self.bias is None else ops.convert_to_tensor(self.bias),
            labels,
            chunk_size=self.chunk_size,
            ignore_class=self.ignore_class,
        )

    def _check_labels(self, labels):
        if is_traced(labels):
            return
        labels = ops.convert_to_numpy(labels)
        unknown = (labels < 0) | (labels >= self.vocabulary_size)
        if self.ignore_class is not None:
            unknown &= labels != self.ignore_class
        if unknown.any():
            raise ValueError(
                f"`labels` must be from 0 to {self.vocabulary_size - 1}, or "
                f"`ignore_class` ({self.ignore_class}). Received: labels with "
                f"{np.unique(labels[unknown])[:5]}"
            )

    def compute_output_spec(self, hidden, labels):
        dtype = wide_dtype(self.compute_dtype)
        return keras.KerasTensor(hidden.shape[:-1], dtype=dtype)
