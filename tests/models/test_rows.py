"""A row of a batch is what its sequence is alone: backbones, streams and tasks."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.models import EfficientTextClassifier, EmbeddingOptions
from tests.autodiff import to_numpy
from tests.models.cases import (
    CASES,
    DECODERS,
    TASKS,
    PreviousToken,
    inputs,
    make_backbone,
    make_task,
)
from tests.models.test_backbone import assert_close, outputs


def moved(data, random):
    """The same rows, with what does not exist on the left and between."""
    data = dict(data)
    for name in [name for name in data if name.endswith("padding_mask")]:
        mask, tokens = data[name], name.replace("padding_mask", "token_ids")
        new_mask = random.permuted(mask, axis=1)
        # A row that begins with padding.
        new_mask[0] = np.sort(mask[0])
        new_tokens = np.full_like(data[tokens], 7)
        new_tokens[new_mask == 1] = data[tokens][mask == 1]
        data |= {name: new_mask, tokens: new_tokens}
    return data


@pytest.mark.parametrize("name", CASES)
def test_padding_may_lie_anywhere(name):
    backbone, data = make_backbone(name), inputs(name)
    for mask in data:
        if mask.endswith("padding_mask"):
            data[mask][1, -2:] = 0
    expected = outputs(backbone, data)
    received = outputs(backbone, moved(data, np.random.default_rng(1)))
    assert_close(received, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", DECODERS)
def test_rows_read_segments_of_different_lengths(name):
    backbone, data = make_backbone(name), inputs(name)
    tokens, random = data["token_ids"], np.random.default_rng(2)
    length = tokens.shape[1]
    whole = to_numpy(backbone({**data, "padding_mask": np.ones_like(tokens)}))
    state, read = backbone.get_initial_state(2, length), np.zeros(2, int)
    while read.min() < length:
        number = np.minimum(random.integers(0, 6, 2), length - read)
        mask = random.permuted(np.arange(5) < number[:, None], axis=1)
        segment = np.full((2, 5), 7, "int32")
        for row, exists in enumerate(mask):
            segment[row, exists] = tokens[row, read[row] :][: number[row]]
        hidden, state = backbone.stream(segment, state, padding_mask=mask)
        for row, exists in enumerate(mask):
            expected = whole[row, read[row] :][: number[row]]
            received = to_numpy(hidden)[row, exists]
            np.testing.assert_allclose(received, expected, rtol=1e-3, atol=1e-4)
        # Rows change places.
        read, tokens, whole = (x[::-1] for x in (read + number, tokens, whole))
        state = keras.tree.map_structure(lambda x: ops.flip(x, axis=0), state)


def test_features_of_rows_of_different_lengths_support_masking():
    class Unmasked(PreviousToken):
        supports_masking = property(lambda self: False, lambda self, value: None)

    embedding = EmbeddingOptions("untied", features=(Unmasked(256, 8),))
    backbone = make_backbone("bytes", embedding=embedding)
    state = backbone.get_initial_state(1)
    mask = np.ones((1, 3), "int32")
    with pytest.raises(ValueError, match="support masking.*padding_mask given"):
        backbone.stream(np.ones((1, 3), "int32"), state, padding_mask=mask)


@pytest.mark.parametrize("attention", ["gated-delta", "softmax", "vq:num_codes=4"])
def test_a_row_without_tokens_poisons_no_other(attention):
    def classifier():
        keras.utils.set_random_seed(3)
        backbone = make_backbone("defaults", attention=attention)
        model = EfficientTextClassifier(backbone, num_classes=2)
        model.compile(keras.optimizers.SGD(0.1), jit_compile=False)
        return model

    tokens = np.random.default_rng(4).integers(1, 50, (2, 6)).astype("int32")
    mask = np.array([[1, 1, 1, 1, 0, 0], [0] * 6], "int32")
    labels, weights = np.array([1, 0]), np.array([1.0, 0.0])
    trained = []
    for label in (0, 1):
        labels[1] = label
        model = classifier()
        data = {"token_ids": tokens, "padding_mask": mask}
        assert np.isfinite(to_numpy(model(data))).all()
        for _ in range(2):
            results = model.train_on_batch(data, labels, sample_weight=weights)
        assert np.isfinite(results).all()
        trained.append([to_numpy(weight) for weight in model.trainable_weights])
    # With a weight of 0, the row's label changes nothing.
    for one, other in zip(*trained, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight"])
@pytest.mark.parametrize("name", TASKS)
def test_rows_without_tokens_or_weight_train_nothing(name, reduction):
    """Compared with a task that never read these rows.

    Keras' default loss divides by the number of all rows, and so differs by a factor.
    """
    number = 2

    def trained(rows):
        task, x, y = make_task(name, batch=number + 2, dropout=0.0)
        # One row is padding alone; the other has no weight.
        for key in x:
            x[key][number] = 0
        mask = x.get("decoder_padding_mask", x.get("padding_mask"))
        weight = (mask if mask.shape == y.shape else np.ones_like(y)).astype("float32")
        weight[number:] = 0
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction=reduction
        )
        task.compile(keras.optimizers.SGD(0.05), loss, weighted_metrics=[])
        data = {key: value[:rows] for key, value in x.items()}
        before = [to_numpy(w) for w in task.trainable_weights]
        history = task.fit(
            data,
            y[:rows],
            sample_weight=weight[:rows],
            epochs=2,
            shuffle=False,
            verbose=0,
        ).history
        after = [to_numpy(w) for w in task.trainable_weights]
        assert (
            max(np.abs(a - b).max() for a, b in zip(after, before, strict=True)) > 1e-3
        )
        return [np.array(history["loss"]), *after]

    for one, other in zip(trained(number + 2), trained(number), strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
