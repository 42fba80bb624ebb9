"""The state of an attention layer that streams: its specification and its checks."""

import keras
from keras import ops

from keras_efficient_attn.ops.common.backend import is_traced, shape_of
from keras_efficient_attn.ops.common.checks import may_agree
from keras_efficient_attn.ops.common.documents import document_numbers
from keras_efficient_attn.ops.common.state import make_state


class StreamingState:
    """Mixin of `EfficientAttention`: the state of a causal layer, segment by segment.

    A layer that streams overrides `state_spec`, and `state_grows` if its state holds
    every position.
    """

    # Whether the state holds every position, and needs a `max_length`.
    state_grows = False
    # Positions that a state holds where nobody says.
    _default_max_length = None
    # Whether the layer accepts states of any length along their second axis.
    _takes_any_state_length = property(lambda self: self.state_grows)

    def state_spec(self, batch_size, max_length):
        """The tensors of the state, or `None` for a layer that does not stream.

        Args:
            batch_size: Rows in the batch.
            max_length: Positions to hold, for a state that grows; otherwise `None`.

        Returns:
            Dict of `(shape, dtype)` for a tensor that starts as zeros, or `(shape,
            dtype, value)` with an initial value that broadcasts to the shape; batch
            first.
        """
        return None

    def get_initial_state(self, batch_size, max_length=None):
        """The state before the first position, for streaming a causal sequence.

        ```python
        state = layer.get_initial_state(batch_size)
        for segment in segments:  # of any length, down to a single position
            output, state = layer(
                segment, segment, use_causal_mask=True, state=state
            )
        ```

        gives the same outputs as one call on the whole sequence.

        Args:
            batch_size: Rows in the batch.
            max_length: Positions that the state can hold, for layers whose
                `state_grows`; outputs beyond them are NaN. Other layers have a state of
                constant size and ignore it. Defaults to `None`.

        Returns:
            Flat dict of tensors, batch first. Floating-point tensors are float32 or
            wider whatever the compute dtype, except caches of `SoftmaxAttention`.

        Raises:
            ValueError: If the layer does not stream, or if its state grows and
                `max_length` is `None`.
        """
        name = type(self).__name__
        if max_length is None:
            max_length = self._default_max_length
        if self.state_grows and max_length is None:
            raise ValueError(
                f"{name} has a state that grows with the context, and needs a "
                "`max_length`. Received: max_length=None"
            )
        spec = self.state_spec(batch_size, max_length)
        if spec is None:
            raise ValueError(
                f"{name} has no state: call it on whole sequences, without `state`. "
                f"Received: the layer {self.name!r}"
            )
        return make_state(spec)

    def _check_state(self, query, value, call):
        if not call.causal:
            raise ValueError(
                "`state` needs `use_causal_mask=True`. Received: use_causal_mask=False"
            )
        if call.scores:
            raise ValueError(
                "`return_attention_scores=True` cannot be used with a `state`: the "
                "keys of earlier segments are not kept. Received: both"
            )
        if not may_agree(query.shape[1:2], value.shape[1:2]):
            raise ValueError(
                "With `state`, `query` and `value` must have the same length. "
                f"Received: query.shape={tuple(query.shape)}, "
                f"value.shape={tuple(value.shape)}"
            )
        state, spec = call.state, self.state_spec(1, 1)
        names = sorted(spec or ())
        if not isinstance(state, dict) or sorted(state) != names:
            received = sorted(state) if isinstance(state, dict) else type(state)
            raise ValueError(
                "`state` must be the dict that `get_initial_state` or the previous "
                f"call returned, with the keys {names}. Received: {received}"
            )
        for name, tensor in state.items():
            # Keras' export first traces a model with floats for all of its inputs.
            dtype = keras.backend.standardize_dtype(tensor.dtype)
            if _kind_of(dtype) not in ("floats", _kind_of(spec[name][1])):
                raise ValueError(
                    "Tensors of `state` must be floats, integers or booleans as in the "
                    "dict of `get_initial_state`. Received: "
                    f"state[{name!r}].dtype={dtype}, instead of {spec[name][1]}"
                )
            if not may_agree(tensor.shape[:1], query.shape[:1]):
                raise ValueError(
                    "`state` must have the batch size of `query`. Received: "
                    f"state[{name!r}].shape={tuple(tensor.shape)}, "
                    f"query.shape={tuple(query.shape)}"
                )
            first = 2 if self._takes_any_state_length else 1
            expected = tuple(spec[name][0])
            if len(tensor.shape) != len(expected) or not may_agree(
                tensor.shape[first:], expected[first:]
            ):
                raise ValueError(
                    "`state` must come from this layer, or from a layer with the same "
                    f"options. Received: state[{name!r}].shape={tuple(tensor.shape)}, "
                    f"instead of {('batch', *expected[1:])}"
                )

    def _attend_by_document(self, inputs, ids, call, options):
        """The output and the state of a segment, one document of each row at a time.

        Each is a segment whose other positions are masked. The first document of a row
        goes on from the state if its id is 0.

        Args:
            inputs: `(query, value, key)`.
            ids: `document_ids`.
            call: `AttentionCall`.
            options: Dict of the layer's own call arguments.

        Raises:
            ValueError: In training, for a layer that learns in its calls.
        """
        if call.training and self._learns:
            raise ValueError(
                "A training call with `state` and `document_ids` would update the "
                "layer once for each document. Train on rows without a `state`, or on "
                "segments of one document each. Received: training=True"
            )
        number = document_numbers(ids)
        mask = call.key_mask
        spec = self.state_spec(1, 1)

        def attend(index, output, state):
            own = number == index
            begins = ops.logical_and(index > 0, ops.any(own, axis=1))
            new = {}
            for name, x in state.items():
                rows = ops.reshape(begins, (-1, *[1] * (len(x.shape) - 1)))
                initial = spec[name][2] if len(spec[name]) > 2 else 0
                new[name] = ops.where(rows, ops.cast(initial, x.dtype), x)
            part, state = self.call(
                *inputs,
                query_mask=call.query_mask,
                key_mask=own if mask is None else ops.logical_and(own, mask),
                training=call.training,
                use_causal_mask=True,
                state=new,
                **options,
            )
            own = ops.reshape(own, (*own.shape, *[1] * (len(output.shape) - 2)))
            output = ops.where(own, ops.cast(part, output.dtype), output)
            return index + 1, output, state

        shape = self.compute_output_shape(*(x.shape for x in inputs))
        output = ops.zeros((*shape_of(inputs[0])[:2], *shape[2:]), self.compute_dtype)
        loop = 0, output, self._as_own_state(call.state)
        last = ops.max(number, initial=0)
        if is_traced(last):
            loop = ops.cast(0, "int32"), *loop[1:]
            return ops.while_loop(lambda index, *_: index <= last, attend, loop)[1:]
        while loop[0] <= last:
            loop = attend(*loop)
        return loop[1:]

    def _as_own_state(self, state):
        """A state in the dtypes of this layer's own states."""
        spec = self.state_spec(1, 1)
        return {name: ops.cast(tensor, spec[name][1]) for name, tensor in state.items()}


def _kind_of(dtype):
    """`"floats"`, `"integers"` or `"booleans"`."""
    dtype = keras.backend.standardize_dtype(dtype)
    if keras.backend.is_float_dtype(dtype):
        return "floats"
    return "integers" if keras.backend.is_int_dtype(dtype) else "booleans"
