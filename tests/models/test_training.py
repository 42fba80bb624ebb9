"""`fit` trains: what layers do in training only happens there, and nowhere else."""

import keras
import numpy as np
import pytest

from tests.autodiff import to_numpy
from tests.models.cases import TASKS, inputs, make_backbone, make_task


def make(name, **options):
    if name == "backbone":
        model, data = make_backbone("defaults", **options), inputs("defaults")
    else:
        model, data, _ = make_task(name, **options)
    # The tasks' own metrics are for classes.
    options = dict(metrics=[], weighted_metrics=[], jit_compile=False)
    model.compile(keras.optimizers.SGD(0.0), "mse", **options)
    return model, data, np.ones(to_numpy(model(data)).shape, "float32")


@pytest.mark.parametrize("documents", [False, True], ids=["plain", "documents"])
@pytest.mark.parametrize("name", ["backbone", *TASKS])
def test_dropout_is_active_in_training_only(name, documents):
    if documents and name in ("seq2seq", "classifier", "image-lm"):
        pytest.skip("it takes no documents")
    options = {"takes_documents": True} if documents else {}
    model, data, labels = make(name, dropout=0.5, **options)
    # The weights do not move.
    trained = [float(model.train_on_batch(data, labels)) for _ in range(2)]
    tested = [float(model.test_on_batch(data, labels)) for _ in range(2)]
    assert tested[0] == tested[1]
    assert len({*trained, tested[0]}) == 3


def test_a_layer_that_learns_in_its_calls_learns_in_fit():
    options = dict(attention="adaptive-span:penalty=10.0", num_layers=1, positions=None)
    model, data, labels = make("causal-lm", **options)
    layer = model.backbone.decoder.blocks[0].attention
    penalty = 10.0 * float(layer.spans().mean())
    tested = float(model.test_on_batch(data, labels))
    trained = float(model.train_on_batch(data, labels))
    np.testing.assert_allclose(trained - tested, penalty, rtol=1e-3)
