import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn import (
    PerformerAttention,
    ReformerLSHAttention,
    ReversibleBlock,
    ReversibleStack,
    SoftmaxAttention,
    VQAttention,
)
from keras_efficient_attn.layers.attention import reformer as reformer_lsh_attention
from keras_efficient_attn.ops.common.scan import vector_jacobian_product
from keras_efficient_attn.ops.lsh_attention.layout import hash_buckets
from keras_efficient_attn.ops.reversible import passes
from tests.autodiff import gradient_function, to_numpy
from tests.largest_tensor import temporary_bytes
from tests.ops.pieces import read_in_pieces
from tests.saving import assert_same_model, saved_and_loaded
from tests.symbolic import check_symbolic_call

BATCH, LENGTH, DIM = 2, 11, 8


def attention_branch(i, kind, dropout, dtype):
    layer = {
        "elu": lambda: PerformerAttention(2, 4, feature_map="elu", dtype=dtype),
        "vq": lambda: VQAttention(
            2,
            4,
            num_codes=3,
            window=None,
            codes={"commitment_weight": 1.0},
            seed=i,
            dtype=dtype,
        ),
        "lsh": lambda: ReformerLSHAttention(
            2,
            4,
            bucket_size=3,
            num_buckets=4,
            num_hashes=2,
            dropout=dropout,
            seed=i,
            dtype=dtype,
        ),
    }[kind]()
    x = keras.Input((None, DIM))
    h = keras.layers.LayerNormalization(dtype=dtype)(x)
    h = layer(h, h, use_causal_mask=True)
    h = keras.layers.Dropout(dropout, seed=10 + i, dtype=dtype)(h)
    return keras.Model(x, h)


def network(i, dropout, dtype):
    return keras.Sequential(
        [
            keras.layers.LayerNormalization(dtype=dtype),
            keras.layers.Dense(12, "gelu", dtype=dtype),
            keras.layers.Dropout(dropout, seed=20 + i, dtype=dtype),
            keras.layers.Dense(DIM, dtype=dtype),
        ]
    )


def make_stack(depth=2, reversible=True, kind="elu", dropout=0.0, dtype=None, **kwargs):
    def f(i):
        # Only the first block attends: each attention takes seconds to compile.
        if i or kind is None:
            return network(30 + i, dropout, dtype)
        return attention_branch(i, kind, dropout, dtype)

    blocks = [ReversibleBlock(f(i), network(i, dropout, dtype)) for i in range(depth)]
    return build(ReversibleStack(blocks, reversible=reversible, dtype=dtype, **kwargs))


def build(stack, seed=0):
    stack.build((BATCH, LENGTH, DIM))
    random = np.random.default_rng(seed)
    for weight in stack.weights:
        if "kernel" in weight.path:
            weight.assign(random.normal(size=weight.shape) * 0.3)
        elif weight.name == "rotations":
            weight.assign(random.normal(size=weight.shape))
    return stack


def inputs(seed=0):
    x = np.random.default_rng(seed).normal(size=(BATCH, LENGTH, DIM))
    return x.astype("float32")


MASK = np.arange(LENGTH)[None] < np.array([[LENGTH], [7]])


def loss_and_gradients(stack, x, mask=None):
    """The loss and the gradients of the input and all weights, in training."""
    variables = stack.trainable_variables
    weight = inputs(seed=3)[..., :1]

    def loss(x, *values):
        scope = keras.StatelessScope(
            list(zip(variables, values, strict=True)), collect_losses=True
        )
        with scope:
            output = stack(x, mask=mask, training=True)
        total = sum((ops.sum(extra) for extra in scope.losses), 0.0)
        return ops.sum(ops.multiply(ops.cast(output, "float32"), weight)) + total

    values = [to_numpy(variable) for variable in variables]
    return gradient_function(loss, with_value=True)(x, *values)


def assert_same_gradients(make, x, mask=None, tolerance=1e-4):
    plain = loss_and_gradients(make(reversible=False), x, mask)
    rebuilt = loss_and_gradients(make(reversible=True), x, mask)
    largest = max(np.abs(gradient).max() for gradient in plain[1:])
    assert largest > 0.1
    np.testing.assert_allclose(rebuilt[0], plain[0], rtol=1e-5)
    for received, expected in zip(rebuilt[1:], plain[1:], strict=True):
        floor = max(np.abs(expected).max(), 1e-2 * largest)
        assert np.abs(received - expected).max() < tolerance * floor


def test_gradients_are_the_plain_ones_at_depth_12_with_dropout_mask_and_lsh():
    def make(reversible):
        return make_stack(12, reversible, kind="lsh", dropout=0.2)

    assert_same_gradients(make, inputs(), MASK)


def test_gradients_in_mixed_precision():
    def make(reversible):
        return make_stack(3, reversible, kind="lsh", dtype="mixed_bfloat16")

    assert_same_gradients(make, inputs(), MASK, tolerance=2e-2)


def test_buckets_are_those_of_the_forward_pass(monkeypatch):
    backward = []

    def vjp(*arguments):
        backward.append(True)
        try:
            return vector_jacobian_product(*arguments)
        finally:
            backward.pop()

    def attend_hashed(x, *arguments):
        # Rounding rarely changes buckets; here a second hashing changes them.
        return hash_buckets(ops.roll(x, 1, axis=1) if backward else x, *arguments)

    monkeypatch.setattr(passes, "vector_jacobian_product", vjp)
    monkeypatch.setattr(reformer_lsh_attention, "hash_buckets", attend_hashed)

    def make(reversible):
        return make_stack(1, reversible, kind="lsh")

    assert_same_gradients(make, inputs())


class Composed(keras.layers.Layer):
    """Has no `build`: Keras builds its sublayers by tracing the call."""

    def __init__(self):
        super().__init__()
        self.norm = keras.layers.LayerNormalization()
        self.inner = network(0, 0.2, None)

    def call(self, x, training=None):
        return self.inner(self.norm(x), training=training)


def test_layers_without_a_build_of_their_own_train():
    def make(reversible):
        blocks = [ReversibleBlock(Composed(), Composed()) for _ in range(2)]
        stack = build(ReversibleStack(blocks, reversible=reversible))
        # Two variables for each normalisation and each `Dense`; each layer has two.
        assert len(stack.trainable_variables) == 4 * 8
        return stack

    assert_same_gradients(make, inputs())


@keras.saving.register_keras_serializable(package="tests")
class Stateful(keras.layers.Layer):
    """Batch statistics, a loss, random numbers and a count."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = keras.layers.BatchNormalization()
        self.drop = keras.layers.Dropout(0.5, seed=3)
        self.dense = keras.layers.Dense(DIM)

    def build(self, shape):
        self.norm.build(shape)
        self.dense.build(shape)
        self.calls = self.add_weight(
            name="calls", initializer="zeros", trainable=False, autocast=False
        )

    def call(self, x, training=None):
        self.calls.assign(self.calls + 1)
        y = self.dense(self.drop(self.norm(x, training=training), training=training))
        self.add_loss(ops.sum(ops.square(y)))
        return y

    def compute_output_shape(self, shape):
        return shape


def stateful_stack(reversible):
    # The same block twice: its state passes from the first use to the second.
    shared = ReversibleBlock(Stateful(), network(1, 0.3, None))
    block = ReversibleBlock(Stateful(), Stateful())
    return build(ReversibleStack([shared, block, shared], reversible=reversible))


def test_a_block_that_is_not_to_be_rebuilt_is_not():
    calls = []

    class Logged(keras.layers.Dense):
        def call(self, x):
            calls.append(self.name)
            return super().call(x)

    def make(reversible):
        halves = [Logged(DIM, "tanh", name=name) for name in "abcdef"]
        blocks = [
            ReversibleBlock(*halves[:2]),
            ReversibleBlock(*halves[2:4], reversible=False),
            ReversibleBlock(*halves[4:]),
        ]
        return build(ReversibleStack(blocks, reversible=reversible))

    assert_same_gradients(make, inputs())
    # The first six calls belong to reversible=False.
    rebuilt = calls[6:]
    assert calls[:6] == list("abcdef")
    assert all((rebuilt.count(name) == 1) == (name in "cd") for name in "abcdef")


def test_gradients_of_layers_with_states_losses_and_shared_weights():
    assert_same_gradients(stateful_stack, inputs())


def test_states_and_losses_count_once():
    stacks = [stateful_stack(reversible) for reversible in (False, True)]
    outputs = [to_numpy(stack(inputs(), training=True)) for stack in stacks]
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
    plain, rebuilt = (
        [to_numpy(v) for v in stack.non_trainable_variables] for stack in stacks
    )
    calls = [
        int(c.numpy() if hasattr(c, "numpy") else c) for c in rebuilt if not c.shape
    ]
    assert sorted(calls) == [1, 1, 2]
    for received, expected in zip(rebuilt, plain, strict=True):
        np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-5)
    plain, rebuilt = (
        [float(to_numpy(loss)) for loss in stack.losses] for stack in stacks
    )
    assert len(plain) == 4
    np.testing.assert_allclose(sorted(rebuilt), sorted(plain), rtol=1e-5)


def test_codebooks_move_once_a_step(backend):
    x, y = inputs(), inputs(seed=4)
    trained = []
    for reversible in (False, True):
        sequence = keras.Input((LENGTH, DIM))
        model = keras.Model(
            sequence, make_stack(1, reversible, kind="vq", dropout=0.1)(sequence)
        )
        model.compile("sgd", "mse", jit_compile=backend != "torch")
        start = [to_numpy(weight) for weight in model.weights]
        for _ in range(3):
            model.train_on_batch(x, y)
        trained.append([to_numpy(weight) for weight in model.weights])
    for plain, rebuilt in zip(*trained, strict=True):
        np.testing.assert_allclose(rebuilt, plain, rtol=1e-4, atol=1e-5)
    counts = [w for w in model.weights if w.name == "count"]
    assert len(counts) == 1
    (index,) = (i for i, w in enumerate(model.weights) if w is counts[0])
    assert np.abs(trained[1][index] - start[index]).max() > 1e-2


def test_training_curves_coincide(backend):
    x, y = np.where(MASK[..., None], inputs(), np.float32(0)), inputs(seed=4)
    curves = []
    for reversible in (False, True):
        sequence = keras.Input((None, DIM))
        masked = keras.layers.Masking()(sequence)
        output = make_stack(2, reversible, kind="lsh", dropout=0.1)(masked)
        model = keras.Model(sequence, output)
        optimizer = keras.optimizers.Adam(3e-3)
        model.compile(optimizer, "mse", jit_compile=backend != "torch")
        # 50 steps, with little overhead of `fit`.
        data = [np.concatenate([array] * 50) for array in (x, y)]
        losses = Losses()
        model.fit(*data, batch_size=BATCH, verbose=0, shuffle=False, callbacks=[losses])
        curves.append(losses.means)
    assert len(curves[0]) == 50 and curves[0][-1] < 0.9 * curves[0][0]
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-3)


class Losses(keras.callbacks.Callback):
    """Records the mean loss of the epoch so far after each step."""

    def __init__(self):
        super().__init__()
        self.means = []

    def on_train_batch_end(self, batch, logs=None):
        self.means.append(logs["loss"])


HASHED = dict(bucket_size=16, num_buckets=4, num_hashes=1)


def kept_bytes(depth, backend):
    """Bytes that a training step of hashed attention stores for its backward pass."""

    def f(i):
        x = keras.Input((None, DIM))
        h = ReformerLSHAttention(2, 4, **HASHED, seed=i)(x, x, use_causal_mask=True)
        return keras.Model(x, h)

    blocks = [ReversibleBlock(f(i), keras.layers.Dense(DIM)) for i in range(depth)]
    stack = build(ReversibleStack(blocks))
    x = np.random.default_rng(0).normal(size=(4, 256, DIM)).astype("float32")
    if backend == "jax":
        import jax

        trainable = [v.value for v in stack.trainable_variables]
        others = [v.value for v in stack.non_trainable_variables]

        def loss(trainable, x):
            y, _ = stack.stateless_call(trainable, others, x, training=True)
            return ops.sum(ops.square(y))

        return temporary_bytes(jax.grad(loss), trainable, x)
    import torch

    weights = {v.value.data_ptr() for v in stack.variables}
    total = 0

    def pack(tensor):
        nonlocal total
        if tensor.data_ptr() not in weights:
            total += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        stack(x, training=True)
    return total


def test_memory_does_not_grow_with_depth(backend):
    if backend == "tensorflow":
        pytest.skip("TensorFlow tells no bytes on a CPU")
    few, more = (kept_bytes(depth, backend) for depth in (2, 3))
    buckets = 4 * 256 * 2 * HASHED["num_hashes"]
    if backend == "torch":
        # Otherwise the streams of 24 blocks would take as much as those of 2.
        assert few == 4 * 256 * DIM * 4 * 2 + 2 * buckets
        assert more == few + buckets
    else:
        # Less than one additional stream.
        assert more - few < 4 * 256 * DIM * 4


def test_halves_are_rebuilt_one_at_a_time_in_graphs_of_tensorflow(backend):
    """The tensors of a rebuilt half are freed once its gradients are known."""
    if backend != "tensorflow":
        pytest.skip("only here is the order of a graph's operations free")
    import tensorflow as tf

    events = []

    def record(x, *event):
        def log(x):
            events.append(event)
            return x

        # Not stateful: a stateful operation would follow the program's order.
        return tf.ensure_shape(tf.numpy_function(log, [x], x.dtype, False), x.shape)

    class Logged(keras.layers.Layer):
        def call(self, x):
            @tf.custom_gradient
            def run(x):
                y = record(tf.sin(x), self.name, "value")

                def gradient(grad_y):
                    # Without a dependency, such a slow gradient would come last.
                    slow = tf.linalg.expm(grad_y @ tf.transpose(y))
                    return record(slow @ x, self.name, "gradient")

                return y, gradient

            return run(x)

    names = [f"half_{i}" for i in range(6)]
    halves = iter(Logged(name=name) for name in names)
    stack = ReversibleStack(
        [ReversibleBlock(next(halves), next(halves)) for _ in "abc"]
    )
    x = tf.constant(np.random.default_rng(0).normal(size=(4, DIM)), "float32")

    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(stack(x, training=True) ** 2)
        return tape.gradient(y, x)

    gradient(x)
    backward = [(name, kind) for name in names[::-1] for kind in ("value", "gradient")]
    assert events == [(name, "value") for name in names] + backward


def test_what_cannot_run_twice_is_refused():
    class Noise(keras.layers.Layer):
        def call(self, x):
            return x + keras.random.normal(ops.shape(x))

        def compute_output_shape(self, shape):
            return shape

    stack = build(ReversibleStack([ReversibleBlock(Noise(), network(0, 0.0, None))]))
    with pytest.raises(ValueError, match="SeedGenerator"):
        stack(inputs(), training=True)


def test_the_formula_and_the_merges():
    x = inputs()
    f, g = network(0, 0.0, None), network(1, 0.0, None)
    block = ReversibleBlock(f, g)
    mean = build(ReversibleStack([block]))
    both = ReversibleStack([block], merge="concatenate")
    y1 = x + to_numpy(f(x))
    y2 = x + to_numpy(g(y1))
    streams = block((x, x))
    for training in (False, True):
        np.testing.assert_allclose(to_numpy(streams[0]), y1, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(to_numpy(streams[1]), y2, rtol=1e-5, atol=1e-5)
        streams = block((x, x), training=True)
        np.testing.assert_allclose(
            to_numpy(mean(x, training=training)), (y1 + y2) / 2, rtol=1e-5, atol=1e-5
        )
        np.testing.assert_allclose(
            to_numpy(both(x, training=training)),
            np.concatenate([y1, y2], -1),
            rtol=1e-5,
            atol=1e-5,
        )


@keras.saving.register_keras_serializable(package="tests")
class Streaming(keras.layers.Layer):
    def __init__(self, attention=None, **kwargs):
        super().__init__(**kwargs)
        self.attention = attention or PerformerAttention(2, 4, feature_map="elu")

    def build(self, shape):
        self.attention.build(shape, shape)

    def get_initial_state(self, batch_size, max_length=None):
        return self.attention.get_initial_state(batch_size, max_length)

    def call(self, x, mask=None, state=None):
        return self.attention(x, x, key_mask=mask, use_causal_mask=True, state=state)


def test_states_that_grow_are_given_their_length():
    blocks = [
        ReversibleBlock(Streaming(SoftmaxAttention(2, 4)), network(i, 0.0, None))
        for i in range(2)
    ]
    stack, x = build(ReversibleStack(blocks)), inputs()
    streamed, _ = read_in_pieces(
        lambda x, state: stack(x, state=state),
        stack.get_initial_state(BATCH, LENGTH),
        [x],
        sizes=(4, LENGTH - 4),
    )
    np.testing.assert_allclose(streamed, to_numpy(stack(x)), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="max_length=None"):
        stack.get_initial_state(BATCH)


def test_masks_and_states_reach_f():
    blocks = [ReversibleBlock(Streaming(), network(i, 0.0, None)) for i in range(2)]
    stack, x = build(ReversibleStack(blocks)), inputs()
    whole = to_numpy(stack(x))
    streamed, state = read_in_pieces(
        lambda x, state: stack(x, state=state),
        stack.get_initial_state(BATCH),
        [x],
        sizes=(4, 1, LENGTH - 5),
    )
    np.testing.assert_allclose(streamed, whole, rtol=1e-4, atol=1e-5)
    # Padding comes first: attention is causal.
    kept = MASK[:, ::-1]
    changed = np.where(kept[..., None], x, 7).astype("float32")
    outputs = [to_numpy(stack(array, mask=kept)) for array in (x, changed)]
    np.testing.assert_allclose(outputs[0][kept], outputs[1][kept], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="has an argument `state`"):
        make_stack(1)(x, state=state)


def test_a_functional_model_has_the_state_of_its_stack():
    blocks = [ReversibleBlock(Streaming(), network(i, 0.0, None)) for i in range(2)]
    stack, x = build(ReversibleStack(blocks, merge="concatenate")), inputs()
    state = stack.get_initial_state(BATCH)
    state = keras.tree.map_structure(ops.ones_like, state)
    check_symbolic_call(stack, x, state)


@pytest.mark.parametrize("training", [False, True])
def test_the_mask_of_an_embedding_reaches_all_blocks(training):
    # Padding comes first: attention is causal.
    kept = MASK[:, ::-1]
    tokens = np.where(kept, np.arange(1, LENGTH + 1), 0)
    embedding = keras.layers.Embedding(LENGTH + 1, DIM, mask_zero=True)
    blocks = [ReversibleBlock(Streaming(), network(i, 0.0, None)) for i in range(2)]
    embedding.build()
    table = np.random.default_rng(0).normal(size=(LENGTH + 1, DIM))
    outputs = []
    for padding in (1.0, 7.0):
        # Padding holds row 0.
        table[0] = padding
        embedding.embeddings.assign(table)
        x = embedding(tokens)
        streams = blocks[1](blocks[0]((x, x), training=training), training=training)
        outputs.append(to_numpy(streams[0] + streams[1])[kept])
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)


def test_saving(tmp_path):
    blocks = [ReversibleBlock(Streaming(), network(i, 0.1, None)) for i in range(2)]
    stack = build(ReversibleStack([*blocks, blocks[0]], merge="concatenate"))
    sequence = keras.Input((None, DIM))
    model = keras.Model(sequence, stack(sequence))
    assert_same_model(saved_and_loaded(model, tmp_path), model, inputs())


def test_invalid_arguments():
    dense = keras.layers.Dense(DIM)
    with pytest.raises(TypeError, match="f=3"):
        ReversibleBlock(3, dense)
    with pytest.raises(TypeError, match="blocks="):
        ReversibleStack([dense])
    with pytest.raises(ValueError, match="blocks="):
        ReversibleStack([])
    with pytest.raises(ValueError, match="merge='sum'"):
        ReversibleStack([ReversibleBlock(dense, dense)], merge="sum")
