"""RelativePositionXL: its memory, documents, lengths and shared biases."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn import PositionBiases, RelativePositionXL
from tests import dense
from tests.autodiff import to_numpy
from tests.largest_tensor import largest_tensor

BATCH, DIM, HEADS, KEY_DIM = 2, 5, 2, 4


def make(memory_length=4, **options):
    """A built layer of an odd width, with nonzero biases."""
    layer = RelativePositionXL(HEADS, KEY_DIM, memory_length=memory_length, **options)
    layer.build((BATCH, 3, DIM), (BATCH, 3, DIM))
    random = np.random.default_rng(1)
    for weight in layer.trainable_weights:
        weight.assign(random.normal(size=weight.shape) * 0.4)
    return layer


def text(length, seed=0):
    random = np.random.default_rng(seed)
    return random.normal(size=(BATCH, length, DIM)).astype("float32")


def read(layer, x, state, **options):
    output, state = layer(x, x, use_causal_mask=True, state=state, **options)
    return to_numpy(output), state


def after_a_memory(layer, x, memory, mask=None, length=None):
    """The expected output for `x` after `memory`, by a double loop."""
    extended = np.concatenate([memory, x], axis=1)

    def heads(layer, query, key, value, **kwargs):
        kwargs["causal"] = "after a memory"
        return dense.xl_heads(layer, query, key, value, **kwargs)

    return dense.layer_output(layer, heads, x, extended, key_mask=mask)[0]


def assert_close(received, expected):
    np.testing.assert_allclose(received, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"same_length": True, "clamp_length": 2}], ids=str
)
def test_a_memory_is_read_as_the_double_loop_does(options):
    layer, x = make(**options), text(10)
    _, state = read(layer, x[:, :7], layer.get_initial_state(BATCH))
    np.testing.assert_array_equal(to_numpy(state["memory"]), x[:, 3:7])
    output, state = read(layer, x[:, 7:], state)
    assert_close(output, after_a_memory(layer, x[:, 7:], x[:, 3:7]))
    np.testing.assert_array_equal(to_numpy(state["memory"]), x[:, 6:])


def test_queries_of_the_same_length_see_as_many_keys_as_the_memory_has():
    """As in the authors' code, the 4 positions include the query's own."""
    layer, x = make(memory_length=4, same_length=True), text(10)
    changed = x.copy()
    changed[:, 3] += 1
    first, second = (to_numpy(layer(t, t, use_causal_mask=True)) for t in (x, changed))
    differs = (np.abs(first - second) > 1e-6).any((0, 2))
    assert differs.tolist() == [3 <= position < 7 for position in range(10)]


def test_empty_slots_are_not_seen():
    layer, x = make(memory_length=6), text(3)
    output, state = read(layer, x, layer.get_initial_state(BATCH))
    assert_close(output, to_numpy(layer(x, x, use_causal_mask=True)))
    assert to_numpy(state["mask"]).tolist() == [[0, 0, 0, 1, 1, 1]] * BATCH
    # Empty slots are not read.
    poisoned = to_numpy(state["memory"]).copy()
    poisoned[:, :3] = np.nan
    following, _ = read(layer, x, {**state, "memory": poisoned})
    assert_close(following, after_a_memory(layer, x, x))


def test_a_row_with_a_new_document_begins_anew_and_the_other_goes_on():
    layer, x = make(), text(8)
    _, state = read(layer, x[:, :5], layer.get_initial_state(BATCH))
    going_on, _ = read(layer, x[:, 5:], state)
    ids = np.repeat(np.array([[1], [0]]), 3, axis=1)
    output, state = read(layer, x[:, 5:], state, document_ids=ids)
    anew = to_numpy(layer(x[:, 5:], x[:, 5:], use_causal_mask=True))
    assert_close(output[0], anew[0])
    assert_close(output[1], going_on[1])
    assert np.abs(going_on[0] - anew[0]).max() > 1e-3
    assert to_numpy(state["mask"]).tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]


def test_a_longer_memory_than_in_training_and_none():
    layer, x = make(memory_length=0), text(9)
    whole = to_numpy(layer(x, x, use_causal_mask=True))
    state, short = layer.get_initial_state(BATCH, 9), layer.get_initial_state(BATCH)
    assert tuple(short["memory"].shape) == (BATCH, 0, DIM)
    for piece in (slice(0, 4), slice(4, 9)):
        output, state = read(layer, x[:, piece], state)
        assert_close(output, whole[:, piece])
        output, short = read(layer, x[:, piece], short)
        alone = to_numpy(layer(x[:, piece], x[:, piece], use_causal_mask=True))
        assert_close(output, alone)


@pytest.mark.usefixtures("on_cpu")
def test_tiles_of_queries_are_the_whole_and_no_matrix_exists():
    layer, x = make(), text(200)
    expected, _ = dense.layer_output(layer, dense.xl_heads, x, x, causal=True)
    assert_close(to_numpy(layer(x, x, use_causal_mask=True)), expected)

    def loss(x):
        return ops.sum(layer(x, x, use_causal_mask=True))

    assert largest_tensor(loss, text(2000)) < 2000 * 2000 * HEADS * BATCH / 4


def test_the_norm_of_today_is_of_the_memory_and_the_segment():
    layer, x = make(), text(7)
    _, state = read(layer, x[:, :5], layer.get_initial_state(BATCH))
    # The memory holds the unchanged inputs.
    layer.input_norm = lambda x: 0.5 * x
    output, state = read(layer, x[:, 5:], state)
    assert_close(output, after_a_memory(layer, 0.5 * x[:, 5:], 0.5 * x[:, 1:5]))
    np.testing.assert_array_equal(to_numpy(state["memory"]), x[:, 3:7])
    whole = to_numpy(layer(x, x, use_causal_mask=True))
    layer.input_norm = None
    assert_close(whole, to_numpy(layer(0.5 * x, 0.5 * x, use_causal_mask=True)))


def test_dropout_on_positions_leaves_contents_alone():
    """The distance keys come from sinusoids, half of them 0 and half doubled."""
    layer, x = make(position_dropout=0.5), text(40)
    outputs = [
        to_numpy(layer(x, x, use_causal_mask=True, training=training))
        for training in (False, True, True)
    ]
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-3
    assert np.abs(outputs[1] - outputs[2]).max() > 1e-3
    width = layer._position.shape[0]
    plain, dropped = (
        to_numpy(layer._position_dropout(np.ones((50, width)), training=training))
        for training in (False, True)
    )
    assert (plain == 1).all() and set(np.unique(dropped)) == {0, 2}
    layer._position.assign(np.zeros(layer._position.shape))
    without = [
        to_numpy(layer(x, x, use_causal_mask=True, training=training))
        for training in (False, True)
    ]
    np.testing.assert_array_equal(*without)
    again = RelativePositionXL.from_config(layer.get_config())
    assert again.get_config()["position_dropout"] == 0.5


def test_layers_that_cannot_share():
    layer, other = make(biases="shared"), RelativePositionXL(HEADS, KEY_DIM)
    with pytest.raises(ValueError, match="built=True"):
        layer.share_weights_with(other)
    with pytest.raises(ValueError, match=f"num_heads={HEADS}"):
        RelativePositionXL(HEADS + 1, KEY_DIM).share_weights_with(other)


def test_symbolic_calls_fold_axes_and_check_the_memory():
    layer = RelativePositionXL(HEADS, KEY_DIM, attention_axes=(1, 2))
    image = keras.Input((2, 3, DIM), batch_size=BATCH)
    layer.build(image.shape, image.shape)
    state = {
        name: keras.Input(x.shape[1:], batch_size=BATCH)
        for name, x in layer.get_initial_state(BATCH).items()
    }
    causal = dict(use_causal_mask=True, state=state)
    output, _ = layer(image, image, **causal)
    assert output.shape == image.shape
    with pytest.raises(ValueError, match="leave out `key`"):
        layer(image, image, keras.ops.copy(image), **causal)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_length": -1}, "memory_length=-1"),
        ({"memory_length": 2.5}, "memory_length=2.5"),
        ({"clamp_length": 0}, "clamp_length=0"),
        ({"same_length": 8}, "same_length=8"),
        ({"same_length": True, "memory_length": 0}, "memory_length=0"),
        ({"biases": "none"}, "biases='none'"),
        ({"biases": PositionBiases(3, 4)}, "num_heads=3"),
    ],
    ids=str,
)
def test_arguments_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RelativePositionXL(HEADS, KEY_DIM, **options)


def test_calls_that_are_refused():
    layer, x = make(), text(3)
    state = layer.get_initial_state(BATCH)
    causal = dict(use_causal_mask=True, state=state)
    with pytest.raises(ValueError, match=r"key\.shape=\(2, 3, 5\)"):
        layer(x, x, x + 1, **causal)
    wide = {**state, "memory": np.zeros((BATCH, 4, DIM + 1), "float32")}
    with pytest.raises(ValueError, match=r"state\['memory'\]\.shape=\(2, 4, 6\)"):
        layer(x, x, use_causal_mask=True, state=wide)
    with pytest.raises(ValueError, match="built=False"):
        RelativePositionXL(HEADS, KEY_DIM).get_initial_state(BATCH)
    with pytest.raises(ValueError, match="max_length=-2"):
        layer.get_initial_state(BATCH, -2)
