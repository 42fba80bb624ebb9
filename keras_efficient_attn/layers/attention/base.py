"""The base of all attention layers of this package."""

import dataclasses
import re

import keras
import numpy as np
from keras import ops

from keras_efficient_attn.distribution import sequence_parallel
from keras_efficient_attn.layers.arguments import KeepsArguments, activation_of
from keras_efficient_attn.layers.attention.axes import SequenceAxes
from keras_efficient_attn.layers.attention.description import LayerDescription
from keras_efficient_attn.layers.attention.masks import (
    MASK_NAMES,
    boolean_masks,
    check_attention_mask,
    check_dense,
    check_document_ids,
    merged_key_mask,
    zero_masked,
)
from keras_efficient_attn.layers.attention.rows import move_to_front
from keras_efficient_attn.layers.attention.state import StreamingState
from keras_efficient_attn.layers.quantization import KeepsQuantization, policy_of
from keras_efficient_attn.layers.replicas import ReplicaLosses
from keras_efficient_attn.ops.common.backend import BACKEND, shape_of
from keras_efficient_attn.ops.common.checks import (
    check_bool,
    check_int,
    check_rate,
    is_int,
    is_positive_int,
    may_agree,
)
from keras_efficient_attn.ops.common.documents import Documents
from keras_efficient_attn.ops.common.inputs import (
    as_mask_tensor,
    hide_masked,
)
from keras_efficient_attn.ops.common.numerics import (
    accumulator_dtype,
    rms_normalize,
    wide_dtype,
)
from keras_efficient_attn.ops.common.positions import rotate_from, window_distances
from keras_efficient_attn.ops.common.rows import row_lengths

# The names that Keras' layer gives its projections.
PROJECTIONS = ("query", "key", "gate", "value", "attention_output")


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """The arguments of an attention call besides queries, keys and values.

    Attributes:
        query_mask: Boolean `(batch, query_length)`, or `None`.
        key_mask: Boolean `(batch, key_length)`, or `None`. True, then false: a layer
            knows padding on the right only, except where it `keeps_places`.
        causal: Whether query `t` sees keys `0..t` only.
        training: Whether the call is a training call.
        state: Dict of tensors, or `None`.
        lengths: The positions of a segment that exist, at the beginning of each row:
            int32 `(batch,)`; `None` for all, and without a state.
        documents: The `Documents` of the sequence, or `None` for one in each row. With
            a state, only for a layer that `remembers_inputs`.
        split: The `SequenceParallel` that splits the sequence over devices, or `None`.
        scores: Whether the matrix of weights is requested.
        options: Further call arguments that the layer defines, by name.
    """

    query_mask: object = None
    key_mask: object = None
    causal: bool = False
    training: bool = False
    state: dict | None = None
    lengths: object = None
    documents: Documents | None = None
    split: object = None
    scores: bool = False
    options: dict = dataclasses.field(default_factory=dict)

    def positions_read(self, x):
        """The `lengths`, or the length of a segment `(batch, length, ...)`."""
        return shape_of(x)[1] if self.lengths is None else self.lengths


class EfficientAttention(
    LayerDescription,
    StreamingState,
    ReplicaLosses,
    KeepsQuantization,
    KeepsArguments,
    keras.layers.MultiHeadAttention,
):
    """Base class: a `MultiHeadAttention` that need not form the attention matrix.

    Constructor, projections, weight names and call are those of
    [`keras.layers.MultiHeadAttention`](https://keras.io/api/layers/attention_layers/multi_head_attention/);
    a subclass adds its own keyword arguments and computes the heads' outputs
    in `attend`. This class adds:

    - **Factored masks.** A query mask `(batch, query_length)`, a key mask `(batch,
      key_length)` and a causal flag instead of a `(batch, query_length,
      key_length)` tensor. Keras' automatic masks and the explicit `query_mask`,
      `key_mask` and `value_mask` are honoured. Masked positions do not exist, wherever
      they lie: outputs, states and gradients are those of the sequence without them,
      and they may be NaN.
    - **Scores on request**, the dense matrix with `heads = scores @ value`, before
      dropout.
    - **State**, for layers that stream: see `get_initial_state`.
    - Rows that see no key, or that the query mask hides, give zero heads (so the
      output is the output projection's bias).

    A subclass must implement `attend`. It describes itself by overriding `state_spec`,
    `state_grows`, `takes_documents`, `is_softmax`, `estimates_softmax`,
    `can_calibrate`, `calibrates_beyond_window`, `estimates_beyond_window`,
    `takes_window_bias`, `shares_with_blocks` and `share_weights_with`,
    `remembers_inputs`, `conversion_refusal`, `operations`.
    `self.keep(locals())` in its constructor makes the arguments attributes, and entries
    of `get_config`.

    Args:
        *args, **kwargs: Arguments of `keras.layers.MultiHeadAttention`.
            `flash_attention=True` is refused, and `sliding_window` by layers without
            a window. `attention_axes` become one sequence; all other axes join the
            batch. `dropout` acts on the attention weights if the layer computes them,
            otherwise on the concatenated heads.
        num_key_value_heads: Number of heads of keys and values, a divisor of
            `num_heads`: each serves `num_heads / num_key_value_heads` heads of
            queries, one after the other (grouped-query attention,
            [Ainslie et al., 2023](https://arxiv.org/abs/2305.13245)). Defaults to
            `None`: as many as `num_heads`.
        value_activation: Activation of projected values, a name or a function.
            Defaults to `None`.
        gate_activation: Activation of the gate, for `use_gate=True`. Defaults to
            `"sigmoid"`, Keras' own.

    Call arguments:
        query: `(batch, query_length, query_dim)`; with `attention_axes`, any rank.
            Integers, here and in `value` and `key`, are cast to the compute dtype.
        value: `(batch, key_length, value_dim)`.
        key: Optional `(batch, key_length, key_dim)`; defaults to `value`.
        query_mask: Optional boolean `(batch, query_length)`.
        value_mask: Optional boolean `(batch, key_length)`.
        key_mask: Optional boolean `(batch, key_length)`. If the call is causal, or if
            `query` is `value` or `key`, a position that is hidden as a key is hidden
            as a query too.
        attention_mask: Optional mask that is the same for all queries: of shape
            `(batch, 1, key_length)` or `(batch, 1, 1, key_length)`.
        return_attention_scores: Whether to return `(output, scores)`; forms the
            `(batch, heads, query_length, key_length)` matrix.
        training: Whether to apply dropout and update statistics.
        use_causal_mask: Whether query `t` sees keys `0..t` only.
        state: Optional state, from `get_initial_state` or the previous segment's
            call. Needs `use_causal_mask=True`. It is cast to the dtypes of the layer's
            own states.
        document_ids: Optional integers `(batch, length)` of rows that hold several
            documents, one after the other; a document begins where they change. Each
            document has the outputs that it has in a row of its own. For calls on one
            sequence: causal, or with `query` as `value` or `key`. With a `state`, id 0
            continues the document of the state; the state that is returned is the last
            document's.

    Returns:
        `output` `(batch, query_length, output_dim)`; `(output, scores)` with
        `return_attention_scores`; `(output, state)` with `state`.

    Raises:
        ValueError: For unsupported values of the arguments above.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import EfficientAttention
    >>> class MeanAttention(EfficientAttention):
    ...     def attend(self, query, key, value, call):
    ...         mean = keras.ops.mean(value, axis=1, keepdims=True)
    ...         return keras.ops.zeros_like(query) + mean, None
    >>> x = keras.random.normal((2, 10, 16))
    >>> MeanAttention(num_heads=2, key_dim=8)(x, x).shape
    (2, 10, 16)
    """

    # Longest wavelength of rotary positions; set by subclasses that rotate.
    rotary_wavelength = None
    # Normalisation of queries and keys, and what `q·k` is divided by, likewise.
    qk_norm, temperature = False, 1.0
    # Whether `sliding_window` of Keras' constructor sets the layer's `window`.
    takes_sliding_window = False
    # Whether `flash_attention` of Keras' constructor chooses the layer's kernel.
    takes_flash_attention = False
    # Function of distances `(n,)`, an integer array, that gives a bias `(n, heads)` of
    # the logits in the window; conversion sets it where a model has such a bias.
    window_bias = None

    def __init__(
        self,
        *args,
        num_key_value_heads: int | None = None,
        value_activation=None,
        gate_activation="sigmoid",
        **kwargs,
    ):
        # autocast=False: the projections cast the inputs themselves, and a state stays
        # float32 under a mixed policy.
        super().__init__(*args, autocast=False, **kwargs)
        self.keep(dict(num_key_value_heads=num_key_value_heads))
        linear = keras.activations.linear
        self.value_activation = (
            activation_of("value_activation", value_activation) or linear
        )
        self.gate_activation = (
            activation_of("gate_activation", gate_activation) or linear
        )
        if not self._use_gate and gate_activation != "sigmoid":
            raise ValueError(
                "`gate_activation` needs `use_gate=True`. Received: "
                f"gate_activation={gate_activation!r}"
            )
        shared = num_key_value_heads
        if shared is not None and (
            not is_positive_int(shared) or self._num_heads % shared
        ):
            raise ValueError(
                "`num_key_value_heads` must be a positive integer that divides "
                f"`num_heads`, or None. Received: num_key_value_heads={shared!r}, "
                f"num_heads={self._num_heads}"
            )
        # The projections are built for one sequence; Keras derives its axis.
        axes = self._attention_axes
        self._sequence_axes = None if axes is None else tuple(axes)
        self._attention_axes = None
        self._check_unread_arguments()
        self._check_keras_options()

    def _check_unread_arguments(self):
        """Raises for invalid arguments that Keras' constructor accepts."""
        check_rate("dropout", self._dropout)
        for name in ("use_bias", "use_gate"):
            check_bool(name, getattr(self, f"_{name}"))
        check_bool("flash_attention", self._flash_attention, optional=True)
        if any(isinstance(axis, bool) for axis in self._sequence_axes or ()):
            raise ValueError(
                "`attention_axes` must be integers. Received: attention_axes="
                f"{self._sequence_axes}"
            )
        if self.seed is not None and not is_int(self.seed):
            raise ValueError(
                f"`seed` must be an integer or None. Received: seed={self.seed!r}"
            )
        for name in ("num_heads", "key_dim", "value_dim", "sliding_window"):
            # Keras takes `True` for 1.
            check_int(name, getattr(self, f"_{name}"), 1, optional=True)
        sizes = self._output_shape
        if sizes is not None and not (sizes and all(map(is_positive_int, sizes))):
            raise ValueError(
                "`output_shape` must be a positive integer, a tuple of them, or None. "
                f"Received: output_shape={sizes!r}"
            )

    def _check_keras_options(self):
        """Raises for unsupported arguments of Keras' constructor."""
        if self._sliding_window is not None and not self.takes_sliding_window:
            raise ValueError(
                f"{type(self).__name__} has no window: leave out `sliding_window`. "
                f"Received: sliding_window={self._sliding_window}"
            )
        if self._flash_attention and not self.takes_flash_attention:
            raise ValueError(
                f"{type(self).__name__} is not softmax attention: leave out "
                f"`flash_attention`. Received: flash_attention={self._flash_attention}"
            )

    def _window_or(self, window, default=None):
        """The layer's `window`, or Keras' `sliding_window` if given.

        Args:
            window: The layer's argument.
            default: The value of `window` that counts as not given.
        """
        sliding = self._sliding_window
        if sliding is None:
            return window
        if window not in (None, default, sliding):
            raise ValueError(
                "`sliding_window` and `window` mean the same for this layer: give one "
                f"of them. Received: sliding_window={sliding}, window={window}"
            )
        return sliding

    def _window_config(self):
        """The current `window`, for `get_config`."""
        sliding = None if self._sliding_window is None else self.window
        config = {"window": self.window, "sliding_window": sliding}
        return {k: v for k, v in config.items() if k not in self.refused_arguments}

    def attend(self, query, key, value, call):
        """Computes attention on projected heads. Subclasses implement this.

        Args:
            query: `(batch, query_length, heads, key_dim)`, projected.
            key: `(batch, key_length, heads, key_dim)`, projected.
            value: `(batch, key_length, heads, value_dim)`, projected.
            call: `AttentionCall`.

        Returns:
            `(heads, state)`: `(batch, query_length, heads, value_dim)`, linear in
            `value`, and the new state (`None` without one).
        """
        raise NotImplementedError

    @property
    def state_dtype(self):
        """Dtype of a state's floating-point tensors and of float32 weights."""
        return wide_dtype(self.compute_dtype)

    @property
    def _learns(self):
        """Whether a training call itself changes weights, or adds a loss."""
        return False

    @property
    def gate_dense(self):
        """The projection of the gate, or `None` without `use_gate`."""
        return self._gate_dense if self._use_gate else None

    def build(self, query_shape, value_shape, key_shape=None):
        axes = SequenceAxes.of(len(query_shape), self._sequence_axes)
        shapes = (query_shape, value_shape, key_shape)
        for name, shape in zip(("query", "value", "key"), shapes, strict=True):
            if shape is not None and len(shape) != axes.rank:
                raise ValueError(
                    f"The ranks of `query` and `{name}` must be equal. Received: "
                    f"{name}.shape={tuple(shape)}, query.shape={tuple(query_shape)}"
                )
        self._build_projections(
            *(shape and axes.sequence_shape(shape) for shape in shapes)
        )

    def _build_projections(self, query_shape, value_shape, key_shape):
        if set(self._projected_heads) == {self._num_heads}:
            super().build(query_shape, value_shape, key_shape)
        else:
            self._build_grouped_projections(query_shape, value_shape, key_shape)
        self._value_dense.activation = self.value_activation
        if self._use_gate:
            self._gate_dense.activation = self.gate_activation

    @property
    def _projected_heads(self):
        """How many heads the projections of queries, keys and values have."""
        shared = self.num_key_value_heads or self._num_heads
        return self._num_heads, shared, shared

    def _build_grouped_projections(self, query_shape, value_shape, key_shape):
        """Builds the projections in Keras' order, some with fewer heads."""
        queries, keys, values = self._projected_heads
        key_shape = value_shape if key_shape is None else key_shape
        self._query_dense = self._projection_to(
            "query", query_shape, queries, self._key_dim
        )
        self._key_dense = self._projection_to("key", key_shape, keys, self._key_dim)
        if self._use_gate:
            self._gate_dense = self._projection_to(
                "gate", query_shape, self._num_heads, self._value_dim
            )
        self._value_dense = self._projection_to(
            "value", value_shape, values, self._value_dim
        )
        self._build_attention(4)
        self._output_dense = self._make_output_dense(
            query_shape, self._get_common_kwargs_for_sublayer(), "attention_output"
        )
        self._output_dense.build((*query_shape[:-1], self._num_heads, self._value_dim))

    def _build_attention(self, rank):
        # Keras derives the axis only once, while building.
        self._attention_axes = None
        super()._build_attention(rank)
        # Its input may be too large for half precision: sums that a norm follows.
        self._dropout_layer.autocast = False

    def _projection_to(self, name, shape, heads, dim):
        projection = keras.layers.EinsumDense(
            "abc,cde->abde",
            output_shape=(None, heads, dim),
            bias_axes="de" if self._use_bias else None,
            name=name,
            **self._get_common_kwargs_for_sublayer(),
        )
        projection.build(shape)
        return projection

    def _new_kernel_initializer(self):
        """A copy, with its own seed, of the projections' kernel initializer."""
        initializer = self._kernel_initializer
        return initializer.__class__.from_config(initializer.get_config())

    def add_weight(self, *args, autocast=False, **kwargs):
        """As of any layer; the weights keep their dtype under a mixed policy.

        In a model they do so anyway: Keras casts those of a layer with `autocast=False`
        only if nothing around it calls it.
        """
        return super().add_weight(*args, autocast=autocast, **kwargs)

    @property
    def attention_axes(self):
        """The attention axes as given; `None` for all."""
        return self._sequence_axes

    def __call__(self, query, *args, **kwargs):
        if BACKEND == "tensorflow":
            named = zip(("value", "key"), args, strict=False)
            check_dense(**{"query": query, **dict(named), **kwargs})
        if isinstance(query, np.ndarray):
            # Keras would make two tensors of an array that is query and value.
            tensor = ops.convert_to_tensor(query)
            args = [tensor if x is query else x for x in args]
            kwargs = {k: tensor if x is query else x for k, x in kwargs.items()}
            query = tensor
        return super().__call__(query, *args, **kwargs)

    def rematerialized_call(self, layer_call, *args, **kwargs):
        """A function that runs `call` on these arguments and keeps no activations.

        One tensor that is passed twice stays one inside, and Python's values stay what
        they are, where JAX would trace them. A layer that learns in its calls runs as
        always: a second run would count twice.
        """
        if self._learns:
            return layer_call
        given = [*args, *kwargs.values()]
        tensors = {id(x): x for x in keras.tree.flatten(given) if ops.is_tensor(x)}

        def call(*tensors_inside):
            inside = dict(zip(tensors, tensors_inside, strict=True))
            found = keras.tree.map_structure(lambda x: inside.get(id(x), x), given)
            named = zip(kwargs, found[len(args) :], strict=True)
            return layer_call(*found[: len(args)], **dict(named))

        function = super().rematerialized_call(call, *args, **kwargs)
        return lambda *args, **kwargs: function(*tensors.values())

    def call(
        self,
        query,
        value,
        key=None,
        query_mask=None,
        value_mask=None,
        key_mask=None,
        attention_mask=None,
        return_attention_scores=False,
        training=None,
        use_causal_mask=False,
        state=None,
        document_ids=None,
        **options,
    ):
        inputs = given = (query, value, value if key is None else key)
        masks = (query_mask, value_mask, key_mask, attention_mask)
        masks = tuple(
            x if x is None or hasattr(x, "shape") else as_mask_tensor(name, x)
            for name, x in zip(MASK_NAMES, masks, strict=True)
        )
        if document_ids is not None and not hasattr(document_ids, "shape"):
            document_ids = as_mask_tensor("document_ids", document_ids)
        axes = self._check_inputs(inputs, masks, state)
        call = AttentionCall(
            causal=bool(use_causal_mask),
            training=bool(training),
            # JAX does not know Keras' wrapper of dict attributes.
            state=None if state is None else dict(state),
            scores=return_attention_scores,
            options=self._call_options(inputs, state, options),
        )
        # `keras.tree` cannot flatten nested tuples under `torch.compile`.
        tensors = (*inputs, *masks, document_ids, *(call.state or {}).values())
        if document_ids is not None:
            check_document_ids(self, document_ids, inputs, call.causal)
        if any(isinstance(x, keras.KerasTensor) for x in tensors):
            return self._output_spec(axes, inputs, call)
        if not all(keras.backend.is_float_dtype(x.dtype) for x in inputs):
            inputs = _as_floats(inputs, self.compute_dtype)
        if axes.rank != 3:
            inputs, masks = _as_sequences(axes, inputs, masks)
        if any(mask is not None for mask in masks):
            inputs, masks = boolean_masks(inputs, masks)
            call = dataclasses.replace(
                call, query_mask=masks[0], key_mask=merged_key_mask(masks, inputs[2])
            )
        self._check_call(*inputs, call)
        # A memory of inputs knows which of them are of the current document.
        in_turn = state is not None and not self.remembers_inputs
        if document_ids is not None and in_turn:
            self._check_state(*inputs[:2], call)
            return self._attend_by_document(inputs, document_ids, call, options)
        splits = sequence_parallel.ACTIVE and state is None
        if splits and inputs[0].shape[1] == inputs[2].shape[1]:
            split = self._split_of(inputs[0], call, document_ids)
            call = dataclasses.replace(call, split=split)
        moved = None
        if call.query_mask is not None or call.key_mask is not None:
            # No position moves to another device.
            keeps_places = call.split is not None or (
                self.keeps_places and state is None
            )
            inputs, call, moved = move_to_front(inputs, call, keeps_places)
        if document_ids is not None:
            order = None if moved is None else moved.query
            documents = Documents.of(document_ids, order)
            call = dataclasses.replace(call, documents=documents)
        if state is not None:
            self._check_state(*inputs[:2], call)
            call = dataclasses.replace(
                call,
                state=self._as_own_state(call.state),
                lengths=row_lengths(call.key_mask),
            )
        if 0 in (inputs[0].shape[1], inputs[2].shape[1]):
            output, more = self._attend_to_nothing(*inputs, call)
        else:
            query, value, key, call = self._prepare_inputs(*inputs, call)
            # Zero the masked positions before the projections: a NaN there would
            # otherwise reach the kernels' gradients as 0 · NaN.
            if call.query_mask is not None:
                query = zero_masked(query, call.query_mask)
            if call.key_mask is not None:
                value = zero_masked(value, call.key_mask)
                key = zero_masked(key, call.key_mask)
            heads = self._project_inputs(query, key, value, call)
            # Compute scores first: attending may update weights, which would then
            # differ from the weights that made the output.
            scores = self._scores(*heads) if call.scores else None
            heads, more = self.attend(*heads)
            output = self._project(heads, query, call.query_mask)
            more = scores if call.scores else more
        if moved is not None:
            output = moved.restore(output)
            more = moved.restore_scores(more) if call.scores else more
        if axes.rank != 3:
            output = axes.from_sequence(output, given[0])
            if return_attention_scores:
                more = axes.scores_from_sequence(more, *given[::2])
        if state is not None or return_attention_scores:
            return output, more
        return output

    def compute_output_spec(self, *args, **kwargs):
        # A call with symbolic inputs is checked and returns before it computes.
        return self.call(*args, **kwargs)

    def _output_spec(self, axes, inputs, call):
        """The results of a call, as `KerasTensor`s."""
        sequences = {
            id(x): keras.KerasTensor(axes.sequence_shape(x.shape), dtype=x.dtype)
            for x in inputs
        }
        sequences = [sequences[id(x)] for x in inputs]
        self._check_call(*sequences, call)
        if call.state is not None:
            self._check_state(*sequences[:2], call)
        shapes = [x.shape for x in inputs]
        output = keras.KerasTensor(
            self.compute_output_shape(*shapes), dtype=self.compute_dtype
        )
        if call.state is not None:
            spec = self.state_spec(1, 1)
            return output, {
                name: keras.KerasTensor(tensor.shape, dtype=spec[name][1])
                for name, tensor in call.state.items()
            }
        if call.scores:
            shape = axes.scores_shape(shapes[0], shapes[2], self._num_heads)
            return output, keras.KerasTensor(shape, dtype=self.compute_dtype)
        return output

    def _prepare_inputs(self, query, value, key, call):
        """The inputs and the call, for layers that read or change them first."""
        return query, value, key, call

    def _attend_to_nothing(self, query, value, key, call):
        """The output without queries or without keys, and the state or the scores."""
        batch, length = shape_of(query)[:2]
        quantised = getattr(self.output_dense, "quantization_mode", None) is not None
        if query.shape[1] == 0 and quantised:
            # Quantised projections cannot read an empty sequence.
            shapes = (x.shape for x in (query, value, key))
            dims = self.compute_output_shape(*shapes)[2:]
            output = ops.zeros((batch, 0, *dims), self.compute_dtype)
        else:
            heads = (batch, length, self._num_heads, self._value_dim)
            heads = ops.zeros(heads, self.compute_dtype)
            query = zero_masked(query, call.query_mask)
            output = self._project(heads, query, call.query_mask)
        if call.scores:
            shape = (batch, self._num_heads, length, shape_of(key)[1])
            return output, ops.zeros(shape, self.compute_dtype)
        return output, call.state

    def _project_inputs(self, query, key, value, call):
        """Query, key and value heads for `attend`, and the call.

        A layer with further projections adds them to the call's `options`.
        """
        query, key = self._query_dense(query), self._key_dense(key)
        value = self._value_dense(value)
        if self.num_key_value_heads is not None:
            key, value = self._for_query_heads(key), self._for_query_heads(value)
        return query, key, value, call

    def _split_of(self, query, call, document_ids):
        """The `SequenceParallel` of the current scope, or `None` for other layers.

        Raises:
            ValueError: If the devices' positions are fewer than the layer's reach, or
                for `document_ids`.
        """
        reach = self.split_reach(call)
        if reach is None:
            return None
        if document_ids is not None:
            raise ValueError(
                "Rows that are split over devices hold one document each: leave out "
                "`document_ids`, or the scope of `SequenceParallel`. Received: both"
            )
        split = sequence_parallel.ACTIVE[-1]
        split.check_window(query, reach)
        return split

    def _for_query_heads(self, x):
        """Projected heads, each repeated for the heads that share it."""
        shared = self._num_heads // x.shape[2]
        return x if shared == 1 else ops.repeat(x, shared, axis=2)

    def _project(self, heads, gate_input, query_mask):
        heads = ops.cast(heads, self.compute_dtype)
        if query_mask is not None:
            heads = hide_masked(heads, query_mask)
        if self._use_gate:
            heads = heads * self._gate_dense(gate_input)
        return self._output_dense(heads)

    def _scores(self, query, key, value, call):
        """The matrix that `attend` applies to values, computed from one-hot values."""
        batch, length = shape_of(key)[:2]
        one_hot = ops.eye(length, dtype=accumulator_dtype(value))[None, :, None, :]
        one_hot = ops.broadcast_to(one_hot, (batch, length, self._num_heads, length))
        quiet = dataclasses.replace(call, training=False)
        scores, _ = self.attend(query, key, one_hot, quiet)
        scores = hide_masked(scores, call.query_mask)
        return ops.cast(ops.transpose(scores, (0, 2, 1, 3)), self.compute_dtype)

    def _rotate(self, x, start=None, dtype=None):
        """Heads with rotary positions, if the layer has any; as `rotate_from`."""
        if self.rotary_wavelength is None:
            return x
        return rotate_from(x, start, self.rotary_wavelength, dtype)

    def _prepare(self, x, dtype, position):
        """Queries or keys, normalised, rotated and scaled."""
        if self.qk_norm:
            x = rms_normalize(ops.cast(x, dtype))
        if self.rotary_wavelength is None:
            x = ops.cast(x, dtype)
        else:
            x = self._rotate(x, position, dtype)
        return x if self._scale == 1.0 else x * self._scale

    def _bias_of_window(self, window, causal, dtype):
        """The bias `(distances, heads)` of a window's logits, or `None`."""
        if self.window_bias is None or not self.takes_window_bias:
            return None
        return ops.cast(self.window_bias(window_distances(window, causal)), dtype)

    def _axes_of(self, rank):
        """`SequenceAxes` of inputs of a rank."""
        return SequenceAxes.of(rank, self._sequence_axes)

    def _check_inputs(self, inputs, masks, state):
        """Checks that shapes agree; returns the `SequenceAxes` of the inputs."""
        query, value, key = inputs
        axes = self._axes_of(len(query.shape))
        for name, x in zip(("query", "value", "key"), inputs, strict=True):
            if len(x.shape) != axes.rank:
                raise ValueError(
                    f"The ranks of `query` and `{name}` must be equal. Received: "
                    f"{name}.shape={tuple(x.shape)}, query.shape={tuple(query.shape)}"
                )
        if key is not value and not may_agree(key.shape[1:-1], value.shape[1:-1]):
            raise ValueError(
                "`key` and `value` must have the same length. Received: "
                f"key.shape={tuple(key.shape)}, value.shape={tuple(value.shape)}"
            )
        names = ("query_mask", "value_mask", "key_mask")
        for name, mask, x in zip(names, masks, inputs, strict=False):
            if mask is not None and not may_agree(mask.shape, x.shape[:-1]):
                raise ValueError(
                    f"`{name}` must have the shape (batch, length) = {x.shape[:-1]}. "
                    f"Received: {name}.shape={tuple(mask.shape)}"
                )
        if masks[3] is not None:
            if not axes.is_sequence:
                raise ValueError(
                    "`attention_mask` needs inputs (batch, length, dim); for inputs "
                    "with more axes, pass `query_mask` and `key_mask`. Received: "
                    f"query.shape={tuple(query.shape)}"
                )
            check_attention_mask(type(self).__name__, tuple(masks[3].shape), key.shape)
        if state is not None and axes.batch_axes:
            raise ValueError(
                "With `state`, `attention_axes` must have all axes between the batch "
                f"and the features. Received: attention_axes={self._sequence_axes}, "
                f"query.shape={tuple(query.shape)}"
            )
        return axes

    def _call_options(self, inputs, state, options):
        """Checks the layer's own call arguments; by default there are none.

        Args:
            inputs: `query`, `value` and `key` of the call.
            state: As in the call.
            options: Dict of call arguments.
        """
        if options:
            raise TypeError(
                f"{type(self).__name__} does not have the call arguments "
                f"{', '.join(sorted(options))}: leave them out."
            )
        return {}

    def _check_call(self, query, value, key, call):
        """Raises for calls that the layer does not support, eager and symbolic."""

    def set_weights(self, weights):
        """Sets all weights, or only the projections, from a `MultiHeadAttention`.

        Args:
            weights: List of arrays: as many as `self.weights`, or those of a
                `keras.layers.MultiHeadAttention` with the same projections.
        """
        projections = [
            variable
            for layer in self._flatten_layers(include_self=False)
            if isinstance(layer, keras.layers.EinsumDense) and layer.name in PROJECTIONS
            for variable in layer.weights
        ]
        if len(weights) == len(self.weights) or len(weights) != len(projections):
            super().set_weights(weights)
            return
        for variable, weight in zip(projections, weights, strict=True):
            variable.assign(weight)

    def get_config(self):
        if self.shares_unsaved:
            raise ValueError(
                "A layer with weights shared by `share_weights_with` has no "
                "configuration: put the blocks of the layers into one "
                "`TransformerStack`, give layers of Transformer-XL one "
                "`PositionBiases` as `biases`, or save with `save_weights`. Received: "
                f"{self.path or self.name}"
            )
        config = super().get_config()
        config["attention_axes"] = self._sequence_axes
        for name in ("value_activation", "gate_activation"):
            config[name] = keras.activations.serialize(getattr(self, name))
        # Paths from here on: the layer may be made inside others.
        above = f"{self.path}/"
        quantized = {
            f"(.+/)?{re.escape(layer.path.removeprefix(above))}": policy_of(layer)
            for layer in self._flatten_layers(include_self=False)
            if layer.quantization_mode is not None
        }
        if quantized:
            policies = keras.dtype_policies.DTypePolicyMap(
                default_policy=policy_of(self).name, policy_map=quantized
            )
            config["dtype"] = keras.dtype_policies.serialize(policies)
        return config


def _as_floats(inputs, dtype):
    """Inputs with integers cast to a dtype, and identical tensors kept identical.

    Keras' projections on PyTorch do not multiply integers with their weights.
    """
    cast = {
        id(x): x if keras.backend.is_float_dtype(x.dtype) else ops.cast(x, dtype)
        for x in inputs
    }
    return tuple(cast[id(x)] for x in inputs)


def _as_sequences(axes, inputs, masks):
    """Inputs as sequences, with identical tensors kept identical, and their masks."""
    query, value, key = inputs
    flat_value = axes.to_sequence(value)
    flat_key = flat_value if key is value else axes.to_sequence(key)
    flat_query = flat_value if query is value else axes.to_sequence(query)
    return (flat_query, flat_value, flat_key), tuple(map(axes.mask_to_sequence, masks))
