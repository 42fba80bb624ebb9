"""`fit` trains: what layers do in training only happens there, and nowhere else."""

import keras
import numpy as np
import pytest

from keras_efficient_attn.models import (
    EfficientCausalLM,
    EfficientMaskedLM,
    EfficientSeq2SeqLM,
    EfficientTextClassifier,
)
from tests.autodiff import to_numpy
from tests.models.cases import inputs, make_backbone

MODELS = {
    "backbone": lambda backbone: backbone,
    "causal": EfficientCausalLM,
    "classifier": lambda backbone: EfficientTextClassifier(backbone, 3),
    "masked": EfficientMaskedLM,
    "pairs": EfficientSeq2SeqLM,
}
ARCHITECTURES = {"classifier": "encoder", "masked": "encoder"}
ARCHITECTURES["pairs"] = "encoder-decoder"


def make(name, **options):
    case = ARCHITECTURES.get(name, "defaults")
    model = MODELS[name](make_backbone(case, **options))
    data = inputs(case)
    if name == "masked":
        data["mask_positions"] = np.array([[1, 2], [3, 4]], "int32")
    # The tasks' own metrics are for classes.
    options = dict(metrics=[], weighted_metrics=[], jit_compile=False)
    model.compile(keras.optimizers.SGD(0.0), "mse", **options)
    return model, data, np.ones(to_numpy(model(data)).shape, "float32")


@pytest.mark.parametrize("documents", [False, True], ids=["plain", "documents"])
@pytest.mark.parametrize("name", MODELS)
def test_dropout_is_active_in_training_only(name, documents):
    if documents and name in ("pairs", "classifier"):
        pytest.skip("it takes no documents")
    options = {"takes_documents": True} if documents else {}
    model, data, labels = make(name, dropout=0.5, **options)
    # The weights do not move.
    trained = [float(model.train_on_batch(data, labels)) for _ in range(2)]
    tested = [float(model.test_on_batch(data, labels)) for _ in range(2)]
    assert tested[0] == tested[1]
    assert len({*trained, tested[0]}) == 3


def test_a_layer_that_learns_in_its_calls_learns_in_fit():
    model, data, labels = make("causal", attention="adaptive-span:penalty=10.0")
    layer = model.backbone.decoder.blocks[0].attention
    penalty = 10.0 * float(layer.spans().mean())
    tested = float(model.test_on_batch(data, labels))
    trained = float(model.train_on_batch(data, labels))
    np.testing.assert_allclose(trained - tested, penalty, rtol=1e-3)
