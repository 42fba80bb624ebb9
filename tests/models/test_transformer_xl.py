"""Segment-level recurrence: a memory between batches, inside and outside of `fit`."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.models import (
    EfficientCausalLM,
    EfficientTransformerBackbone,
    Segments,
    TransformerXL,
)
from tests.autodiff import to_numpy
from tests.models.cases import SIZES, make_backbone, randomize
from tests.saving import assert_same_model, saved_and_loaded

BATCH, LENGTH = 2, 4


def make_model(memory_length=None, attention="xl:memory_length=6", **options):
    backbone = EfficientTransformerBackbone(
        **{
            **SIZES,
            "num_layers": 2,
            "attention": attention,
            "embedding": "untied",
            **options,
        }
    )
    randomize(backbone)
    return TransformerXL(EfficientCausalLM(backbone), BATCH, memory_length)


def tokens(length, rows=BATCH, seed=0):
    random = np.random.default_rng(seed)
    return random.integers(1, 50, (rows, length)).astype("int32")


def whole(model, text):
    """Logits of one call on the whole text, without a memory."""
    mask = np.ones(text.shape, "int32")
    return to_numpy(model.language_model({"token_ids": text, "padding_mask": mask}))


def assert_close(received, expected):
    np.testing.assert_allclose(received, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.any_backend
@pytest.mark.parametrize(
    "text", [np.arange(23), list(range(23))], ids=["array", "list"]
)
def test_segments_of_a_text_go_on_from_each_other(text):
    data = Segments(text, batch_size=2, length=4)
    batches = [data[i] for i in range(len(data))]
    rows = np.concatenate([x["token_ids"] for x, _, _ in batches], axis=1)
    targets = np.concatenate([y for _, y, _ in batches], axis=1)
    weights = np.concatenate([w for _, _, w in batches], axis=1)
    assert [x["reset"].tolist() for x, _, _ in batches] == [[True] * 2] + [
        [False] * 2
    ] * 2
    np.testing.assert_array_equal(weights, np.tile(np.arange(12) < 11, (2, 1)))
    np.testing.assert_array_equal(rows[:, :11], [np.arange(11), np.arange(11, 22)])
    np.testing.assert_array_equal(targets[:, :11], rows[:, :11] + 1)


@pytest.mark.any_backend
def test_documents_begin_with_a_reset():
    documents = [np.arange(10, 16), np.arange(20, 23), np.arange(30, 34), [1]]
    data = Segments(documents, batch_size=2, length=3)
    read = {}
    for i in range(len(data)):
        inputs, targets, weights = data[i]
        for row in range(2):
            if weights[row].any():
                kept = weights[row] == 1
                first = inputs["token_ids"][row][0]
                read[int(first)] = (i, row, bool(inputs["reset"][row]))
                np.testing.assert_array_equal(
                    targets[row][kept], inputs["token_ids"][row][kept] + 1
                )
    # The first document has two segments in a row; the others follow the shorter row.
    assert read == {
        10: (0, 0, True),
        13: (1, 0, False),
        20: (0, 1, True),
        30: (1, 1, True),
    }


def test_segments_equal_one_pass_over_the_text():
    model, text = make_model(memory_length=12, num_layers=1), tokens(12)
    received = [to_numpy(model(text[:, i : i + 4])) for i in range(0, 12, 4)]
    assert_close(np.concatenate(received, axis=1), whole(model, text))
    # The memory is kept.
    again = to_numpy(model(text[:, :4]))
    assert np.abs(again - received[0]).max() > 1e-2
    model.reset_memory()
    assert_close(to_numpy(model(text[:, :4])), received[0])
    row = {"token_ids": text[:, :4], "reset": np.array([False, True])}
    third = to_numpy(model(row))
    assert_close(third[1], received[0][1])
    assert np.abs(third[0] - received[0][0]).max() > 1e-2


def test_fit_carries_the_memory_and_starts_epochs_afresh(backend):
    model = make_model(dropout=0.2, num_layers=1)
    text = tokens(18, rows=1)[0]
    data = Segments(text, BATCH, LENGTH)
    assert len(data) == 2
    model.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=backend != "torch",
    )
    memories = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if keras.backend.backend() == "jax":
                self.model.jax_state_sync()
            weights = model.non_trainable_weights
            masks = [w for w in weights if tuple(w.shape) == (BATCH, 6)]
            memories.append([to_numpy(mask).sum() for mask in masks])

    before = model.evaluate(data, verbose=0)
    model.fit(data, epochs=6, verbose=0, callbacks=Watch(), validation_data=data)
    # Four positions after the first batch of each epoch, then all six, whatever the
    # validation in between read.
    assert memories == [[4 * BATCH], [6 * BATCH]] * 6
    assert model.evaluate(data, verbose=0) < before
    # Dropout, in training only.
    x = data[0][0]
    quiet, again, noisy = (to_numpy(model(x, training=t)) for t in (False, False, True))
    np.testing.assert_array_equal(quiet, again)
    assert np.abs(noisy - quiet).max() > 1e-3


def test_fit_trains_with_dropout_and_codes():
    """Each trainer tells the layers that it trains; JAX's does so by `call` alone."""
    attention = "vq:num_codes=4,window=2"
    model = make_model(attention=attention, dropout=0.5, num_layers=1)
    model.compile(
        keras.optimizers.SGD(0.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    text, codes = tokens(LENGTH + 1), model.language_model.backbone.decoder.blocks[0]
    before = [to_numpy(v) for v in codes.attention.non_trainable_variables]
    batch = text[:, :-1], text[:, 1:]
    tested = model.evaluate(*batch, batch_size=BATCH, verbose=0)
    history = model.fit(*batch, batch_size=BATCH, verbose=0).history
    assert abs(history["loss"][0] - tested) > 1e-3
    after = [to_numpy(v) for v in codes.attention.non_trainable_variables]
    pairs = zip(before, after, strict=True)
    assert sum(not np.array_equal(*pair) for pair in pairs) > 1


def test_a_row_that_overflows_keeps_its_memory():
    model = make_model(memory_length=12, num_layers=1)
    table = model.language_model.backbone.token_embedding.embeddings
    values = to_numpy(table).copy()
    values[49] = np.inf
    table.assign(values)
    text = tokens(3 * LENGTH) % 49
    bad = text[:, LENGTH : 2 * LENGTH].copy()
    bad[0, 1] = 49
    model(text[:, :LENGTH])
    assert not np.isfinite(to_numpy(model(bad))[0]).all()
    received = to_numpy(model(text[:, 2 * LENGTH :]))
    # The first row has read its first and its last segment only.
    skipped = np.concatenate([text[:, :LENGTH], text[:, 2 * LENGTH :]], axis=1)
    assert_close(received[0], whole(model, skipped)[0, LENGTH:])
    assert_close(received[1], whole(model, text)[1, 2 * LENGTH :])


def test_evaluation_with_a_longer_memory_is_one_long_pass():
    model, text = make_model(), tokens(17, rows=1)
    longer = TransformerXL(model.language_model, 1, memory_length=16)
    logits = longer.predict(Segments(text[0], 1, 4), verbose=0)
    assert_close(logits.reshape(1, 16, -1), whole(model, text[:, :16]))
    # A memory of 6 in two layers does not reach that far.
    short = TransformerXL(model.language_model, 1)
    difference = short.predict(Segments(text[0], 1, 4), verbose=0) - logits
    assert np.abs(difference[:2]).max() < 1e-3 < np.abs(difference[3]).max()


def test_the_file_comes_back_with_its_memory(tmp_path):
    model, text = make_model(), tokens(4)
    model(text)
    assert_same_model(saved_and_loaded(model, tmp_path), model, text)


def test_the_memory_is_normed_with_the_weights_of_today():
    """The memory holds a block's inputs: a changed norm changes their keys."""
    model, text = make_model(num_layers=1, memory_length=8), tokens(8)
    model(text[:, :4])
    residual = model.language_model.backbone.transformer_layers[0].attention_residual
    residual.norm.gamma.assign(residual.norm.gamma * 1.5)
    assert_close(to_numpy(model(text[:, 4:])), whole(model, text)[:, 4:])


def test_gtrxl_streams():
    model, text = make_model(12, residual="gated", num_layers=1), tokens(12)
    received = [to_numpy(model(text[:, i : i + 6])) for i in (0, 6)]
    assert_close(np.concatenate(received, axis=1), whole(model, text))


@pytest.mark.any_backend
def test_layers_of_a_backbone_share_biases():
    own, shared = (
        make_backbone("defaults", num_layers=3, attention=f"xl:biases={biases}")
        for biases in ("own", "shared")
    )
    sizes = 2 * SIZES["hidden_dim"]
    assert own.count_params() - shared.count_params() == 2 * sizes
    config = shared.get_config()
    restored = EfficientTransformerBackbone.from_config(config)
    assert restored.count_params() == shared.count_params()


@pytest.mark.any_backend
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2, "memory_length": -1}, "memory_length=-1"),
    ],
)
def test_arguments_that_are_refused(options, message):
    model = EfficientCausalLM(make_backbone("defaults", attention="xl"))
    with pytest.raises(ValueError, match=message):
        TransformerXL(model, **options)


@pytest.mark.any_backend
def test_what_has_no_memory_of_constant_size():
    model = EfficientCausalLM(make_backbone("softmax"))
    with pytest.raises(ValueError, match="SoftmaxAttention"):
        TransformerXL(model, 2)


@pytest.mark.any_backend
def test_data_that_are_refused():
    model = make_model()
    model.compile(loss=lambda y_true, y_pred: ops.mean(y_pred))
    for run in (model.predict, model.evaluate, model.fit):
        with pytest.raises(ValueError, match="2 rows.*array of 3 rows, batch_size=2"):
            run(tokens(LENGTH, rows=3), batch_size=2)
        with pytest.raises(ValueError, match="array of 4 rows, batch_size=None"):
            run({"token_ids": tokens(LENGTH, rows=4)})
    with pytest.raises(ValueError, match=r"2 rows.*\(3, 4\)"):
        model(tokens(4, rows=3))
    data = Segments(np.arange(20), 3, 4)
    for run in (model.fit, model.evaluate, model.predict):
        with pytest.raises(ValueError, match="batch_size=3"):
            run(data, verbose=0)
    with pytest.raises(ValueError, match="shuffle=True"):
        model.fit(Segments(np.arange(20), 2, 4), shuffle=True)
    with pytest.raises(ValueError, match="2 tokens for"):
        Segments(np.arange(2), 2, 4)
    with pytest.raises(ValueError, match="length=0"):
        Segments(np.arange(9), 2, 0)
    with pytest.raises(ValueError, match=r"tokens\.shape=\(2, 9\)"):
        Segments(np.ones((2, 9)), 2, 3)
    with pytest.raises(ValueError, match=r"`tokens` must be one row.*ranks \[0, 1\]"):
        Segments([1, [2, 3]], 1, 1)
    with pytest.raises(ValueError, match=r"`tokens` must be one row.*ranks \[2\]"):
        Segments([np.ones((2, 9))], 1, 3)


@pytest.mark.any_backend
def test_a_last_batch_of_a_dataset_with_fewer_rows_is_refused():
    tf = pytest.importorskip("tensorflow")
    model = make_model()
    model.compile(loss=lambda y_true, y_pred: ops.mean(y_pred))
    data = tf.data.Dataset.from_tensor_slices(tokens(LENGTH, rows=3))
    # TensorFlow's error in a graph.
    with pytest.raises(Exception, match="must have 2 rows"):
        model.predict(data.batch(2), verbose=0)
    assert len(model.predict(data.batch(2, drop_remainder=True), verbose=0)) == 2


def test_the_memory_has_one_order_on_every_backend():
    # A file from one backend loads on another: mask, then memory.
    shapes = [tuple(variable.shape) for variable in make_model()._memory]
    assert shapes == [(BATCH, 6), (BATCH, 6, 8)] * (len(shapes) // 2)
