"""Rows of several documents: in backbones, tasks and the preprocessor."""

import keras
import numpy as np
import pytest

from keras_efficient_attn import models
from tests.autodiff import to_numpy
from tests.saving import saved_and_loaded

LENGTHS = [(7, 1, 12), (20,), (3, 9, 8)]
TOKENS = 11
BACKBONES = {
    "decoder": dict(
        attention=["performer:feature_map=elu,chunk_size=4", "local:query_block=4"],
        positions=models.PositionOptions("learned", max_length=20),
        convolution=4,
    ),
    "encoder": dict(
        architecture="encoder",
        attention=["softmax", "adaptive-span:max_span=8"],
        feed_forward=models.FeedForwardOptions("relu", separable_convolution=True),
        positions=models.PositionOptions("sinusoidal", each_layer=True),
    ),
    "reversible": dict(
        attention="gated-delta:chunk_size=4",
        residual="reversible",
        feed_forward=models.FeedForwardOptions("relu", separable_convolution=True),
    ),
    "universal": dict(
        attention="sparse:pattern=fixed,stride=4",
        recurrence=models.RecurrenceOptions(2, timestep_embedding="learned"),
        positions=models.PositionOptions("sinusoidal", each_layer=True),
    ),
    "rotary": dict(attention="xl:memory_length=8", positions=None),
}


def backbone_of(**options):
    keras.utils.set_random_seed(0)
    return models.EfficientTransformerBackbone(
        TOKENS, 2, 2, 8, 16, takes_documents=True, **options
    )


def packed_inputs():
    """Inputs whose second row has masked positions, and each document's places."""
    random = np.random.default_rng(0)
    ids = np.stack([np.repeat(np.arange(len(n)), n) for n in LENGTHS])
    mask = np.ones(ids.shape, bool)
    mask[1] = random.random(mask.shape[1]) > 0.3
    tokens = random.integers(1, TOKENS, ids.shape)
    names = "token_ids", "padding_mask", "document_ids"
    inputs = dict(zip(names, (tokens, mask, ids), strict=True))
    inputs = {name: x.astype("int32") for name, x in inputs.items()}
    places = [
        (row, np.flatnonzero((ids[row] == number) & mask[row]))
        for row in range(len(ids))
        for number in np.unique(ids[row])
    ]
    return inputs, places


@pytest.mark.parametrize("options", BACKBONES.values(), ids=BACKBONES)
def test_a_document_is_what_it_is_alone(options):
    backbone = backbone_of(**options)
    inputs, places = packed_inputs()
    output = to_numpy(backbone(inputs))
    for row, positions in places:
        tokens = inputs["token_ids"][row : row + 1, positions]
        alone = backbone({"token_ids": tokens, "padding_mask": np.ones_like(tokens)})
        np.testing.assert_allclose(
            output[row, positions], to_numpy(alone)[0], rtol=1e-4, atol=1e-5
        )


def test_learned_positions_are_those_of_documents():
    positions = models.PositionOptions("learned", max_length=5)
    backbone = backbone_of(attention="softmax", positions=positions)
    tokens = np.arange(1, 11, dtype="int32")[None]
    inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    with pytest.raises(ValueError, match="at most 5 tokens"):
        backbone(inputs)
    output = to_numpy(backbone({**inputs, "document_ids": tokens // 6}))
    alone = {name: x[:, :5] for name, x in inputs.items()}
    np.testing.assert_allclose(output[:, :5], to_numpy(backbone(alone)), rtol=1e-4)


TEXTS = ["some text", "abc", "de", "a longer text of many bytes", "x", "another"]


def task_of(pack):
    keras.utils.set_random_seed(0)
    backbone = models.EfficientTransformerBackbone(
        256, 1, 2, 8, 16, attention="gated-delta", takes_documents=True
    )
    preprocessor = models.EfficientCausalLMPreprocessor(
        models.EfficientByteTokenizer(), 24, pack=pack
    )
    task = models.EfficientCausalLM(backbone, preprocessor)
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    task.compile(keras.optimizers.SGD(0.1), loss, weighted_metrics=[])
    return task


def test_fit_on_packed_rows_is_fit_on_the_documents():
    rows = {}
    for pack in (False, True):
        task = task_of(pack)
        x, y, weight = (
            {n: np.asarray(t) for n, t in part.items()}
            if isinstance(part, dict)
            else np.asarray(part)
            for part in task.preprocessor(TEXTS)
        )
        task.preprocessor = None
        losses = [task.train_on_batch(x, y, weight) for _ in range(2)]
        rows[pack] = losses, [to_numpy(w) for w in task.trainable_weights], y, weight
    assert len(rows[True][2]) < len(rows[False][2]) == len(TEXTS)
    # The same tokens, each once.
    labels = [sorted(y[w > 0].tolist()) for _, _, y, w in rows.values()]
    assert labels[0] == labels[1]
    np.testing.assert_allclose(rows[True][0], rows[False][0], rtol=1e-4)
    for packed, alone in zip(rows[True][1], rows[False][1], strict=True):
        np.testing.assert_allclose(packed, alone, rtol=1e-3, atol=2e-5)


def test_texts_are_packed_in_a_dataset_and_fitted():
    tf = pytest.importorskip("tensorflow")
    task = task_of(True)
    texts = tf.data.Dataset.from_tensor_slices(TEXTS).batch(len(TEXTS))
    x, y, _ = next(iter(texts.map(task.preprocessor)))
    eager = task.preprocessor(TEXTS)
    np.testing.assert_array_equal(y, np.asarray(eager[1]))
    ids = np.asarray(eager[0]["document_ids"])
    np.testing.assert_array_equal(x["document_ids"], ids)
    assert (np.diff(ids, axis=1) >= 0).all() and ids.max() > 0
    assert np.isfinite(task.fit(TEXTS, verbose=0).history["loss"][0])


@pytest.mark.any_backend
def test_one_text_cannot_be_packed():
    preprocessor, message = task_of(True).preprocessor, "`x` must be a batch of texts"
    with pytest.raises(ValueError, match=message):
        preprocessor(TEXTS[0])
    tf = pytest.importorskip("tensorflow")
    with pytest.raises(ValueError, match=message):
        tf.data.Dataset.from_tensor_slices(TEXTS).map(preprocessor)


def test_a_task_with_documents_is_saved_and_generates(tmp_path):
    task = task_of(False)
    loaded = saved_and_loaded(task, tmp_path)
    inputs, _, _ = task.preprocessor(["ab", "cde"])
    inputs = {name: np.asarray(x) for name, x in inputs.items()}
    ids = np.arange(24) // 5 + np.zeros((2, 1), int)
    for given in (inputs, {**inputs, "document_ids": ids.astype("int32")}):
        np.testing.assert_allclose(
            to_numpy(loaded(given)), to_numpy(task(given)), rtol=1e-5, atol=1e-6
        )
    texts = []
    for model in (task, loaded):
        model.compile(sampler="greedy")
        texts.append(model.generate(["ab", "cde"], max_length=8))
    assert texts[0] == texts[1]


def test_errors_name_what_was_received():
    with pytest.raises(ValueError, match="takes_documents=True, architecture='enc"):
        backbone_of(architecture="encoder_decoder")
    with pytest.raises(ValueError, match="favor"):
        backbone_of(architecture="encoder", attention="performer:feature_map=favor++")
    with pytest.raises(ValueError, match="one class per row"):
        models.EfficientTextClassifier(backbone_of(architecture="encoder"), 2)
    with pytest.raises(ValueError, match="`pack`"):
        models.EfficientCausalLMPreprocessor(models.EfficientByteTokenizer(), pack=1)
    backbone = backbone_of()
    x, ids = keras.ops.ones((1, 4, 8)), np.zeros((1, 4), "int32")
    state = backbone.decoder.get_initial_state(1)
    with pytest.raises(ValueError, match="`document_ids` or a `state`"):
        backbone.decoder(x, state=state, document_ids=ids)
