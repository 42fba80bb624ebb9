"""KerasHub's tasks on converted backbones: training, generation, presets."""

import keras
import keras_hub
import numpy as np
from keras import ops
from keras_hub import models

from keras_efficient_attn.models import convert_backbone
from tests.models.conversion import families
from tests.saving import saved_and_loaded

# Not exact, so that the new computation is visible.
PERFORMER = "performer:window=2,num_features=4"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "fox"]


def array(x):
    return ops.convert_to_numpy(x)


def test_a_classifier_trains_and_comes_back_from_a_preset(tmp_path):
    backbone = families.make("bert", num_layers=1, dropout=0.0)
    backbone = convert_backbone(backbone, PERFORMER)
    tokenizer = models.BertTokenizer(vocabulary=WORDS, lowercase=True)
    preprocessor = models.BertTextClassifierPreprocessor(tokenizer, sequence_length=6)
    task = models.BertTextClassifier(backbone, num_classes=2, preprocessor=preprocessor)
    backbone.enable_lora(2)
    before = {weight.path: array(weight) for weight in task.weights}
    task.compile(
        keras.optimizers.SGD(1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=keras.backend.backend() != "torch",
    )
    texts = ["the quick fox", "quick"]
    history = task.fit(np.array(texts), np.array([0, 1]), batch_size=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    changed = {
        path.rsplit("/", 1)[-1]
        for path, weight in before.items()
        if "/self_attention_layer/" in path
        and (array(weight_of(task, path)) != weight).any()
    }
    # As in KerasHub, the biases of layers with LoRA also train.
    assert changed == {"bias", "lora_kernel_b"}

    # By the name of the task's kind and of the stock task.
    folder = str(tmp_path / "preset")
    task.save_to_preset(folder)
    loaded = keras_hub.models.TextClassifier.from_preset(folder)
    assert type(loaded) is models.BertTextClassifier
    assert type(loaded.backbone) is type(backbone)
    assert loaded.preprocessor.sequence_length == 6
    data = preprocessor(texts)
    expected = array(task(data))
    np.testing.assert_allclose(array(loaded(data)), expected, rtol=0, atol=1e-5)
    stock = models.BertTextClassifier.from_preset(folder, load_weights=False)
    assert type(stock.backbone) is type(backbone)
    again = keras_hub.models.Backbone.from_preset(folder)
    families.assert_same_outputs(loaded.backbone, again, data)
    found = keras_hub.models.TextClassifierPreprocessor.from_preset(folder)
    assert type(found) is models.BertTextClassifierPreprocessor

    other = saved_and_loaded(task, tmp_path)
    np.testing.assert_allclose(array(other(data)), expected, rtol=0, atol=1e-5)


def weight_of(model, path):
    return next(weight for weight in model.weights if weight.path == path)
