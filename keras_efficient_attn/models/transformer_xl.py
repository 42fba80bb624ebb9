"""TransformerXL: a language model with a memory of the previous batch."""

import keras
import numpy as np
from keras import ops

from keras_efficient_attn.layers.keras_internals import update_variables
from keras_efficient_attn.models.tasks.task import TaskWrapper
from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.checks import check_int, check_positive_int


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class TransformerXL(TaskWrapper):
    """Segment-level recurrence: a language model with a memory across batches.

    A call treats each row as the continuation of the same row in the previous call and
    starts from the layers' states after that call. The states are untrained variables,
    and no gradient flows through them. `evaluate` and `predict` start from an empty
    memory, and so does each epoch of `fit`. A row can reset its memory at any batch.
    A row whose new memory is not finite, such as by an overflow, keeps the one before.

    The layers are usually `keras_efficient_attn.RelativePositionXL`, which reach back
    `num_layers · memory_length` positions. Any layer with a state of constant size
    works; training is then that of Transformer-VQ, or truncated backpropagation through
    time as for a recurrent network.

    Args:
        language_model: An `EfficientCausalLM`. Training changes its weights. It can
            `generate`, and several `TransformerXL` may share it, for example one for
            evaluation.
        batch_size: Rows of every batch.
        memory_length: Memory length of each `RelativePositionXL`; may be larger in
            evaluation than in training. Defaults to the layers' own.
        **kwargs: Arguments of `keras.Model`.

    Call arguments:
        inputs: Dict of `token_ids`, integers `(batch_size, length)`, and optionally
            `reset`, boolean `(batch_size,)`: rows in which a new document begins. Or
            the `token_ids` alone.

    Returns:
        Float32 logits `(batch_size, length, vocabulary_size)`.

    Raises:
        ValueError: If a layer's state grows with the context; from a call, for a
            batch of another size.

    Example:

    ```python
    backbone = EfficientTransformerBackbone(
        vocabulary_size=256,
        num_layers=4,
        num_heads=4,
        hidden_dim=64,
        intermediate_dim=256,
        attention="xl:memory_length=128",
    )
    model = TransformerXL(EfficientCausalLM(backbone), batch_size=8)
    model.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    model.fit(Segments(text, batch_size=8, length=128), epochs=10)

    longer = TransformerXL(model.language_model, batch_size=1, memory_length=1024)
    longer.compile(loss=model.loss)
    longer.evaluate(Segments(held_out, batch_size=1, length=64))
    ```

    Reference:
        - [Dai et al., 2019](https://arxiv.org/abs/1901.02860)
    """

    task_argument = "language_model"

    def __init__(self, language_model, batch_size, memory_length=None, **kwargs):
        super().__init__(**kwargs)
        check_positive_int("batch_size", batch_size)
        check_int("memory_length", memory_length, 0, optional=True)
        self.language_model = language_model
        self.keep(locals(), omit=("language_model",))
        self._memory = [
            self.add_weight(
                name="memory",
                shape=x.shape,
                dtype=keras.backend.standardize_dtype(x.dtype),
                initializer="zeros",
                trainable=False,
                autocast=False,
            )
            for x in _leaves(self._empty_memory())
        ]
        self.reset_memory()
        self.built = True

    def reset_memory(self):
        """Empties the memory of all rows."""
        # Within `fit`, the training state is newer than the variables.
        update_variables(self)
        self._store_memory(self._empty_memory())

    def call(self, inputs, training=None):
        reset = None
        if isinstance(inputs, dict):
            inputs, reset = inputs["token_ids"], inputs.get("reset")
        batch_size, length = shape_of(inputs)
        message = (
            f"Every batch must have {self.batch_size} rows, as many as the memory: "
            "pass another `batch_size` to the model, or drop_remainder=True to `batch` "
            f"of a dataset. Received: a batch of shape {tuple(inputs.shape)}"
        )
        if isinstance(batch_size, int) and batch_size != self.batch_size:
            raise ValueError(message)
        if not isinstance(batch_size, int):
            # TensorFlow may know the batch size only at run time.
            import tensorflow as tf

            tf.debugging.assert_equal(batch_size, self.batch_size, message)
        tokens = ops.reshape(inputs, (self.batch_size, length))
        # A copy: PyTorch's backward pass may need it after the assignment.
        memory = [ops.copy(variable) for variable in self._memory]
        empty = self._empty_memory()
        if reset is not None:
            memory = [
                _where_rows(reset, new, old)
                for new, old in zip(_leaves(empty), memory, strict=True)
            ]
        memory = _pack(empty, iter(memory))
        backbone = self.language_model.backbone
        hidden, new_memory = backbone.stream(tokens, memory, training=training)
        logits = backbone.token_embedding(hidden, reverse=True)
        before, after = list(_leaves(memory)), list(_leaves(new_memory))
        # Every later segment would read what overflowed: such a row keeps its memory.
        finite = _finite_rows(after)
        rows = (_where_rows(finite, *pair) for pair in zip(after, before, strict=True))
        self._store_memory(_pack(empty, rows))
        return logits

    def fit(self, x=None, y=None, *, shuffle=False, callbacks=None, **kwargs):
        """As `keras.Model.fit`, in the order of the data.

        Raises:
            ValueError: With `shuffle=True`, or for batches of another size.
        """
        if shuffle:
            raise ValueError(
                "The memory comes from the previous batch, so data must keep its "
                "order: pass shuffle=False. Received: shuffle=True"
            )
        self._check_data(x, kwargs.get("batch_size"))
        held_out = kwargs.get("validation_data")
        self._check_data(
            held_out[0] if isinstance(held_out, tuple) else held_out,
            kwargs.get("validation_batch_size") or kwargs.get("batch_size"),
        )
        callbacks = self._with_resets(callbacks)
        return super().fit(x, y, shuffle=False, callbacks=callbacks, **kwargs)

    def evaluate(self, x=None, y=None, *, callbacks=None, **kwargs):
        """As `keras.Model.evaluate`, from an empty memory on."""
        self._check_data(x, kwargs.get("batch_size"))
        return super().evaluate(x, y, callbacks=self._with_resets(callbacks), **kwargs)

    def predict(self, x, *, callbacks=None, **kwargs):
        """As `keras.Model.predict`, from an empty memory on."""
        self._check_data(x, kwargs.get("batch_size"))
        return super().predict(x, callbacks=self._with_resets(callbacks), **kwargs)

    def compute_output_spec(self, inputs, training=None):
        tokens = inputs["token_ids"] if isinstance(inputs, dict) else inputs
        vocabulary_size = self.language_model.backbone.vocabulary_size
        shape = (self.batch_size, tokens.shape[1], vocabulary_size)
        return keras.KerasTensor(shape, dtype="float32")

    def _empty_memory(self):
        """The layers' states before the first segment."""
        return self.language_model.backbone.get_initial_state(
            self.batch_size, max_length=None, memory_length=self.memory_length
        )

    def _store_memory(self, memory):
        for variable, x in zip(self._memory, _leaves(memory), strict=True):
            variable.assign(ops.stop_gradient(x))

    def _check_data(self, data, batch_size=None):
        received = None
        if isinstance(data, Segments) and data.batch_size != self.batch_size:
            received = f"segments with batch_size={data.batch_size}"
        if isinstance(data, dict):
            data = data.get("token_ids")
        if hasattr(data, "shape"):
            # Keras' own batch size is 32.
            rows, size = data.shape[0], batch_size or 32
            if min(rows, size) != self.batch_size or rows % self.batch_size:
                received = f"an array of {rows} rows, batch_size={batch_size}"
        if received is not None:
            raise ValueError(
                f"Every batch must have {self.batch_size} rows, as many as the memory: "
                f"pass batch_size={self.batch_size}, and data with a multiple of as "
                f"many rows. Received: {received}"
            )

    def _with_resets(self, callbacks):
        # `fit` passes its own list to the evaluation after an epoch.
        if isinstance(callbacks, keras.callbacks.CallbackList):
            return callbacks
        if callbacks is None:
            callbacks = []
        elif not isinstance(callbacks, list | tuple):
            callbacks = [callbacks]
        return [_ResetMemory(), *callbacks]


class _ResetMemory(keras.callbacks.Callback):
    """Empties the memory before each run over data."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.reset_memory()

    def on_test_begin(self, logs=None):
        self.model.reset_memory()

    def on_predict_begin(self, logs=None):
        self.model.reset_memory()


def _leaves(state):
    """The tensors of a nest of dicts, sorted by name; saved files rely on this order.

    `keras.tree.flatten` has another order on PyTorch than on other backends.
    """
    if not isinstance(state, dict):
        return [state]
    return [leaf for name in sorted(state) for leaf in _leaves(state[name])]


def _pack(like, leaves):
    """Rebuilds a nest of dicts from an iterator over its tensors in `_leaves` order."""
    if not isinstance(like, dict):
        return next(leaves)
    return {name: _pack(like[name], leaves) for name in sorted(like)}


def _where_rows(rows, chosen, other):
    """`chosen` where the `(batch,)` mask is true, else `other`, row by row."""
    rows = ops.reshape(ops.cast(rows, "bool"), (-1, *[1] * (len(other.shape) - 1)))
    return ops.where(rows, chosen, other)


def _finite_rows(tensors):
    """Whether all entries of a row are finite in every tensor, `(batch,)`."""
    finite = True
    for x in tensors:
        axes = tuple(range(1, len(x.shape)))
        finite = ops.logical_and(finite, ops.all(ops.isfinite(x), axis=axes))
    return finite


class Segments(keras.utils.PyDataset):
    """Batches whose rows continue the rows of the previous batch.

    A text is cut into `batch_size` equal documents. Documents
    of any length are assigned to rows in order, each to the row that has read least.
    The last segment of a document is padded, with weight 0.

    Args:
        tokens: The text, integers `(length,)`, as an array or a list; or a list of
            such texts: documents. The last token of a document is only predicted, not
            read.
        batch_size: Rows per batch.
        length: Positions per segment.
        **kwargs: Arguments of `keras.utils.PyDataset`.

    Yields:
        `(inputs, targets, weights)`: a dict of `token_ids`, `(batch_size, length)`,
        and `reset`, `(batch_size,)`, true where a document begins; the next tokens;
        and weights, 1 for real targets and 0 at padding, both `(batch_size, length)`.

    Raises:
        ValueError: If there is no batch, or an argument is invalid.

    Example:

    >>> import numpy as np
    >>> from keras_efficient_attn.models import Segments
    >>> data = Segments(np.arange(21), batch_size=2, length=5)
    >>> inputs, targets, weights = data[1]
    >>> inputs["token_ids"]
    array([[ 5,  6,  7,  8,  9],
           [15, 16, 17, 18, 19]], dtype=int32)
    """

    def __init__(self, tokens, batch_size, length, **kwargs):
        super().__init__(**kwargs)
        check_positive_int("batch_size", batch_size)
        check_positive_int("length", length)
        self.batch_size = batch_size
        self.length = length
        is_list, documents = isinstance(tokens, list | tuple), tokens
        ranks = set(map(np.ndim, tokens)) if is_list else {np.ndim(tokens) - 1}
        if ranks == {0}:
            documents = _equal_documents(np.asarray(tokens), batch_size)
        elif not is_list or ranks - {1}:
            received = f"a list of tensors of ranks {sorted(ranks)}"
            if not is_list:
                received = f"tokens.shape={np.shape(tokens)}"
            raise ValueError(
                "`tokens` must be one row of integers, or a list of them. Received: "
                f"{received}"
            )
        self._rows = [[] for _ in range(batch_size)]
        for document in documents:
            document = np.asarray(document)
            # For each segment: its document and its start in the document.
            segments = [
                (document, start) for start in range(0, len(document) - 1, length)
            ]
            min(self._rows, key=len).extend(segments)
        if not self._rows[0]:
            raise ValueError(
                "`tokens` must hold at least two tokens for each row of a batch. "
                f"Received: {sum(map(len, documents))} tokens for "
                f"batch_size={batch_size}"
            )

    def __len__(self):
        return max(map(len, self._rows))

    def __getitem__(self, index):
        shape = (self.batch_size, self.length)
        tokens, targets = np.zeros(shape, "int32"), np.zeros(shape, "int32")
        weights = np.zeros(shape, "float32")
        reset = np.ones(self.batch_size, bool)
        for row, segments in enumerate(self._rows):
            if index >= len(segments):
                continue
            document, start = segments[index]
            piece = document[start : start + self.length + 1]
            count = len(piece) - 1
            tokens[row, :count], targets[row, :count] = piece[:-1], piece[1:]
            weights[row, :count] = 1.0
            reset[row] = start == 0
        return {"token_ids": tokens, "reset": reset}, targets, weights


def _equal_documents(text, count):
    """`count` equal documents; each ends with the first token of the next."""
    length = (len(text) - 1) // count
    return [text[i * length : (i + 1) * length + 1] for i in range(count)]
