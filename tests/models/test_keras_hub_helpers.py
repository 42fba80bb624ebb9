"""KerasHub's own tests of backbones and tasks, run on ours."""

import importlib.util
import sys
import types

import keras
import numpy as np
import pytest

from keras_efficient_attn.models import (
    EfficientByteTokenizer,
    EfficientCausalLM,
    EfficientCausalLMPreprocessor,
    EfficientMaskedLM,
    EfficientMaskedLMPreprocessor,
    EfficientTextClassifier,
    EfficientTextClassifierPreprocessor,
    EfficientTransformerBackbone,
)
from tests.models.cases import ELU, SIZES

tf = pytest.importorskip("tensorflow")
# Their module imports Grain, which only tests of preprocessing pipelines use.
if importlib.util.find_spec("grain") is None:
    sys.modules.setdefault("grain", types.ModuleType("grain"))

from keras_hub.src.tests.test_case import TestCase  # noqa: E402

OPTIONS = {**SIZES, "vocabulary_size": 256, "attention": ELU}
TEXTS = ["The quick brown fox", "jumped", "over", "it"]
LABELS = np.array([0, 1, 0, 1])


def trace_once(preprocessor):
    """The preprocessor, with one graph shared by all pipelines."""
    eager = preprocessor.call
    graph = tf.function(eager, reduce_retracing=True)

    def call(*args, **kwargs):
        chosen = eager if tf.executing_eagerly() else graph
        return chosen(*args, **kwargs)

    preprocessor.call = call
    return preprocessor


class KerasHubTest(TestCase):
    def test_backbone(self):
        self.run_backbone_test(
            cls=EfficientTransformerBackbone,
            init_kwargs=OPTIONS,
            input_data={
                "token_ids": keras.ops.ones((2, 5), "int32"),
                "padding_mask": keras.ops.ones((2, 5), "int32"),
            },
            expected_output_shape=(2, 5, SIZES["hidden_dim"]),
        )

    def task(self, cls, preprocessor, options, data, shape, **kwargs):
        self.run_task_test(
            cls=cls,
            init_kwargs={
                "backbone": EfficientTransformerBackbone(**OPTIONS, **kwargs),
                "preprocessor": trace_once(
                    preprocessor(
                        EfficientByteTokenizer(), sequence_length=12, **options
                    )
                ),
            }
            | ({"num_classes": 2} if cls is EfficientTextClassifier else {}),
            train_data=data,
            expected_output_shape=shape,
        )

    def test_causal_lm(self):
        self.task(
            EfficientCausalLM,
            EfficientCausalLMPreprocessor,
            {},
            (TEXTS,),
            (4, 12, 256),
        )

    def test_text_classifier(self):
        self.task(
            EfficientTextClassifier,
            EfficientTextClassifierPreprocessor,
            {},
            (TEXTS, LABELS),
            (4, 2),
            architecture="encoder",
        )

    def test_masked_lm(self):
        self.task(
            EfficientMaskedLM,
            EfficientMaskedLMPreprocessor,
            # All bytes are masked, so that nothing is drawn.
            dict(
                mask_selection_rate=1.0,
                mask_selection_length=12,
                mask_token_rate=1.0,
                random_token_rate=0.0,
            ),
            (TEXTS,),
            (4, 12, 256),
            architecture="encoder",
        )
