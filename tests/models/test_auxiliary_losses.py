"""Auxiliary losses: formula, schedule, and the trained model."""

import keras
import numpy as np
import pytest

from keras_efficient_attn.models import (
    AuxiliaryLosses,
    EfficientCausalLM,
    RecurrenceOptions,
    ResidualOptions,
)
from tests.autodiff import to_numpy
from tests.models.cases import inputs, make_backbone, randomize
from tests.saving import saved_and_loaded


def make(residual="pre_norm", num_layers=3, backbone=(), **options):
    backbone = make_backbone(
        "defaults",
        attention="softmax",
        num_layers=num_layers,
        residual=ResidualOptions(residual, norm="rms_norm"),
        **dict(backbone),
    )
    options = {"total_steps": 13, "num_targets": 2, "target_weight": 0.25, **options}
    training = AuxiliaryLosses(EfficientCausalLM(backbone), **options)
    for part in (*filter(None, training.norms), *training.heads):
        randomize(part, seed=1)
    return training


def make_compiled(training, ignore_class=None, **options):
    # Frozen weights, so that all steps have the same losses.
    training.compile(
        keras.optimizers.SGD(0.0),
        keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=ignore_class
        ),
        **options,
    )
    return training


def batch():
    x = inputs("defaults")
    y = np.roll(x["token_ids"], -1, axis=1)
    # Padding, and weights other than 0 and 1.
    return x, y, x["padding_mask"] * np.linspace(0.5, 1.5, y.shape[1])


def cross_entropy(logits, labels):
    logits = logits - logits.max(-1, keepdims=True)
    logits = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -np.take_along_axis(logits, labels[..., None], -1)[..., 0]


def position_losses(training, x, y, weights):
    """The weighted losses of all positions, by layer and distance of the target."""
    backbone, result = training.model.backbone, {}
    hidden = backbone.embedding(x["token_ids"])
    heads, last = iter(training.heads), len(backbone.decoder.blocks) - 1
    for i, block in enumerate(backbone.decoder.blocks):
        hidden = block(hidden, padding_mask=x["padding_mask"])
        normed = to_numpy(hidden).astype("float64")
        norm = backbone.decoder.final_norm if i == last else training.norms[i]
        if norm is not None:
            mean_square = (normed**2).mean(-1, keepdims=True)
            scale = to_numpy(norm.weights[0])
            normed = normed / np.sqrt(mean_square + norm.epsilon) * scale
        for shift in range(i == last, training.num_targets):
            kernel, bias = (to_numpy(w) for w in next(heads).weights)
            length = max(y.shape[1] - shift, 0)
            losses = cross_entropy(normed[:, :length] @ kernel + bias, y[:, shift:])
            result[i, shift] = (
                losses * weights[:, shift:] * (weights[:, :length] > 0)
            ).ravel()
    return result


def losses_of_layers(training, *rows):
    """`L[l]` of every layer, without the compiled loss of the last.

    Args:
        training: `AuxiliaryLosses`.
        *rows: Tuples `(x, y, weights)` of sequences that are computed by themselves.
    """
    parts = [position_losses(training, *row) for row in rows]
    result = [0.0] * len(training.model.backbone.decoder.blocks)
    for i, shift in parts[0]:
        mean = np.concatenate([part[i, shift] for part in parts]).mean()
        result[i] += (training.target_weight if shift else 1.0) * mean
    return result


def test_losses_and_schedule_are_those_of_the_formula():
    training = make_compiled(make())
    x, y, weights = batch()
    plain = training.evaluate(x, y, sample_weight=weights, verbose=0)
    of_layers = losses_of_layers(training, (x, y, weights))
    # Layer l stops after l / 2n of 13 steps, n = 3: 2.17 and 4.33.
    assert training.stops() == (3, 5)
    received = training.fit(x, y, sample_weight=weights, epochs=6, verbose=0)
    for step, loss in enumerate(received.history["loss"]):
        expected = plain + of_layers[2]
        expected += of_layers[0] * (step < 13 * 1 / 6)
        expected += of_layers[1] * (step < 13 * 2 / 6)
        assert abs(loss - expected) < 1e-4 * expected, step


def test_a_weight_of_a_row_is_that_of_its_positions():
    training = make_compiled(make(num_layers=1))
    x, y, _ = batch()
    weights = np.array([[0.5], [2.0]])
    plain = training.evaluate(x, y, sample_weight=weights, verbose=0)
    by_position = np.broadcast_to(weights, y.shape)
    (expected,) = losses_of_layers(training, (x, y, by_position))
    received = training.fit(x, y, sample_weight=weights, verbose=0).history["loss"]
    np.testing.assert_allclose(received, [plain + expected], rtol=1e-4)


def test_documents_are_what_they_are_alone():
    documents = {"takes_documents": True, "positions": "sinusoidal"}
    training = make_compiled(make(num_layers=2, num_targets=3, backbone=documents))
    x, y, weights = batch()
    x["padding_mask"] = np.ones_like(x["padding_mask"])
    weights = np.maximum(weights, 0.25)
    # The second row has the id 3 twice; one document is shorter than the targets.
    names, lengths = [(0, 1), (3, 4, 3)], [(6, 7), (5, 1, 7)]
    ids = [np.repeat(*row) for row in zip(names, lengths, strict=True)]
    x["document_ids"] = np.stack(ids).astype("int32")
    plain = training.evaluate(x, y, sample_weight=weights, verbose=0)
    alone = []
    for row, sizes in enumerate(lengths):
        for stop, size in zip(np.cumsum(sizes), sizes, strict=True):
            own = slice(row, row + 1), slice(stop - size, stop)
            inputs = {name: x[name][own] for name in ("token_ids", "padding_mask")}
            alone.append((inputs, y[own], weights[own]))
    of_layers = losses_of_layers(training, *alone)
    received = training.fit(x, y, sample_weight=weights, verbose=0).history["loss"]
    np.testing.assert_allclose(received, [plain + sum(of_layers)], rtol=1e-4)


@pytest.mark.parametrize("eager", [False, True])
def test_an_ignored_class_is_no_target(eager):
    training = make_compiled(make(num_layers=1), ignore_class=-1, run_eagerly=eager)
    x, y, weights = batch()
    # The last target; so the second target of the position before it.
    y[:, -1] = -1
    plain = training.evaluate(x, y, sample_weight=weights, verbose=0)
    kept = y[:, :-1], weights[:, :-1]
    x_kept = {name: tensor[:, :-1] for name, tensor in x.items()}
    (expected,) = losses_of_layers(training, (x_kept, *kept))
    received = training.fit(x, y, sample_weight=weights, verbose=0).history["loss"]
    np.testing.assert_allclose(received, [plain + expected], rtol=1e-4)


def test_documents_of_one_token_have_no_second_target():
    training = make_compiled(
        make(num_layers=1, backbone={"takes_documents": True}, num_targets=2)
    )
    x, y, weights = batch()
    x["document_ids"] = np.arange(y.size, dtype="int32").reshape(y.shape)
    plain = training.evaluate(x, y, sample_weight=weights, verbose=0)
    received = training.fit(x, y, sample_weight=weights, verbose=0).history["loss"]
    np.testing.assert_allclose(received, [plain], rtol=1e-5)


@pytest.mark.any_backend
def test_a_model_that_takes_no_documents_ignores_them():
    training, (x, _, _) = make(num_layers=1), batch()
    ids = np.arange(x["token_ids"].size).reshape(x["token_ids"].shape)
    received = training({**x, "document_ids": ids}, training=True)
    np.testing.assert_array_equal(
        to_numpy(received["logits"]), to_numpy(training.model(x))
    )


@pytest.mark.parametrize(
    "kinds", [("post_norm", "pre_norm"), ("pre_norm", "post_norm")], ids=str
)
def test_each_layer_has_the_norm_of_its_own_residual(kinds):
    training = make_compiled(make(kinds, num_layers=2))
    x, y, weights = batch()
    plain = training.evaluate(x, y, sample_weight=weights, verbose=0)
    normed = [kind == "pre_norm" for kind in kinds]
    norms = [training.norms[0], training.model.backbone.decoder.final_norm]
    assert [norm is not None for norm in norms] == normed
    of_layers = losses_of_layers(training, (x, y, weights))
    received = training.fit(x, y, sample_weight=weights, verbose=0).history["loss"]
    np.testing.assert_allclose(received, [plain + sum(of_layers)], rtol=1e-4)


def test_all_of_it_is_saved_and_the_model_learns(tmp_path):
    training, (x, y, weights) = make("reversible", num_layers=2), batch()
    # Streams that end and restart between layers are unchanged.
    logits = to_numpy(training(x, training=True)["logits"])
    np.testing.assert_allclose(
        logits, to_numpy(training.model(x)), rtol=1e-4, atol=1e-5
    )
    # Compiled training is tested above.
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    training.compile("adam", loss, run_eagerly=True)
    before = [to_numpy(w) for w in training.trainable_weights]
    training.train_on_batch(x, y, weights)
    for weight, old in zip(training.trainable_weights, before, strict=True):
        if "kernel" in weight.path:
            assert np.any(to_numpy(weight) != old), weight.path
    restored = saved_and_loaded(training, tmp_path)
    # The step is a weight too.
    assert to_numpy(restored._training_step) == 1
    for one, other in zip(restored.weights, training.weights, strict=True):
        np.testing.assert_array_equal(to_numpy(one), to_numpy(other))
    np.testing.assert_allclose(
        to_numpy(restored(x)), to_numpy(training.model(x)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.any_backend
def test_heads_are_as_many_as_the_paper_counts():
    training = make("post_norm", num_layers=12)
    heads = sum(head.count_params() for head in training.heads) / ((8 + 1) * 50)
    # T12, in millions: 41.2 at inference, 44 in training.
    assert round(41.2 + heads * (512 + 1) * 256 / 1e6) == 44


@pytest.mark.any_backend
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total_steps": 0}, "total_steps=0"),
        ({"num_targets": 1.5}, r"num_targets=1\.5"),
        ({"target_weight": -1}, "target_weight=-1"),
        ({"target_weight": float("inf")}, "target_weight=inf"),
    ],
    ids=str,
)
def test_errors_name_what_was_received(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.any_backend
def test_models_of_another_kind_are_refused():
    with pytest.raises(ValueError, match="causal language model"):
        AuxiliaryLosses(make_backbone("encoder"), total_steps=1)
    universal = make_backbone("defaults", recurrence=RecurrenceOptions(2, "sinusoidal"))
    with pytest.raises(ValueError, match="UniversalTransformer"):
        AuxiliaryLosses(EfficientCausalLM(universal), total_steps=1)


@pytest.mark.any_backend
def test_sequences_have_a_position_for_each_target():
    with pytest.raises(ValueError, match=r"y\.shape=\(2, 1\)"):
        make().compute_loss(None, np.zeros((2, 1)), {})


@pytest.mark.any_backend
def test_weights_of_rows_have_two_axes():
    training, (x, y, _) = make_compiled(make(num_layers=1)), batch()
    with pytest.raises(ValueError, match=r"weights\[:, None\].*\.shape=\(2,\)"):
        training.train_on_batch(x, y, np.ones(2))
