"""A text classifier."""

import keras
import keras_hub
from keras import ops

from keras_efficient_attn.models.backbone import EfficientTransformerBackbone
from keras_efficient_attn.models.tasks.byte_tokenizer import EfficientByteTokenizer
from keras_efficient_attn.models.tasks.task import TaskMixin
from keras_efficient_attn.ops.common.checks import check_rate


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class EfficientTextClassifierPreprocessor(keras_hub.models.TextClassifierPreprocessor):
    """Strings to `token_ids` and `padding_mask`; labels pass through.

    Args:
        tokenizer: A tokenizer.
        sequence_length: Tokens per row; longer texts are truncated and shorter texts
            padded. Defaults to 512.
        **kwargs: Arguments of `keras_hub.models.TextClassifierPreprocessor`.

    Example:

    ```python
    from keras_efficient_attn.models import (
        EfficientByteTokenizer,
        EfficientTextClassifierPreprocessor,
    )

    preprocessor = EfficientTextClassifierPreprocessor(
        EfficientByteTokenizer(), sequence_length=16
    )
    x, y = preprocessor(["good", "bad"], [1, 0])
    ```
    """

    backbone_cls = EfficientTransformerBackbone
    tokenizer_cls = EfficientByteTokenizer

    def call(self, x, y=None, sample_weight=None):
        return without_segments(super().call(x, y, sample_weight))


def without_segments(data):
    """`x`, `(x, y)` or `(x, y, sample_weight)`, without `segment_ids` in `x`."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    x = {name: value for name, value in x.items() if name != "segment_ids"}
    return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class MeanOfTokens(keras.layers.GlobalAveragePooling1D):
    """The mean over the positions that exist; zeros for a row that has none.

    Call arguments:
        inputs: `(batch, length, dim)`.
        mask: `(batch, length)`, 0 at positions that do not exist.
    """

    def call(self, inputs, mask):
        mask = ops.cast(mask, inputs.dtype)[..., None]
        number = ops.sum(mask, axis=1)
        return ops.sum(inputs * mask, axis=1) / ops.where(number > 0, number, 1.0)


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class EfficientTextClassifier(TaskMixin, keras_hub.models.TextClassifier):
    """Classifier of texts: the mean of the backbone's outputs, and a dense layer.

    Args:
        backbone: An `EfficientTransformerBackbone`, `"encoder"` or `"decoder"`.
        num_classes: Number of classes.
        preprocessor: An `EfficientTextClassifierPreprocessor`, or `None` for inputs
            that are dicts of `token_ids` and `padding_mask`.
        activation: Activation of the output. Defaults to `None`: logits.
        dropout: Rate of dropout before the dense layer. Defaults to 0.
        compile: Whether to compile with KerasHub's defaults. Defaults to `True`.
        **kwargs: Arguments of KerasHub's tasks.

    Returns:
        On a call, float32 `(batch, num_classes)`.

    Raises:
        ValueError: If the backbone is an encoder-decoder.

    Example:

    ```python
    from keras_efficient_attn import models

    backbone = models.EfficientTransformerBackbone(
        vocabulary_size=256,
        num_layers=2,
        num_heads=4,
        hidden_dim=64,
        intermediate_dim=256,
        architecture="encoder",
    )
    preprocessor = models.EfficientTextClassifierPreprocessor(
        models.EfficientByteTokenizer(), sequence_length=100
    )
    model = models.EfficientTextClassifier(
        backbone, num_classes=2, preprocessor=preprocessor
    )
    model.fit(["good", "bad"], [1, 0])
    ```
    """

    backbone_cls = EfficientTransformerBackbone
    preprocessor_cls = EfficientTextClassifierPreprocessor

    def __init__(
        self,
        backbone,
        num_classes,
        preprocessor=None,
        activation=None,
        dropout: float = 0.0,
        compile: bool = True,
        **kwargs,
    ):
        self.set_parts(backbone, preprocessor, "encoder", "decoder")
        if "document_ids" in backbone.input:
            raise ValueError(
                "A classifier gives one class per row: `backbone` must have "
                "takes_documents=False. Received: takes_documents=True"
            )
        check_rate("dropout", dropout)
        inputs = backbone.input
        # Half precision cannot count the tokens of a long text.
        pooled = MeanOfTokens("channels_last", dtype="float32", name="pooling")(
            backbone(inputs), mask=inputs["padding_mask"]
        )
        pooled = keras.layers.Dropout(dropout, dtype="float32", name="dropout")(pooled)
        outputs = keras.layers.Dense(
            num_classes, activation=activation, dtype="float32", name="logits"
        )(pooled)
        super().__init__(inputs=inputs, outputs=outputs, compile=False, **kwargs)
        self.num_classes = num_classes
        self.activation = keras.activations.get(activation)
        self.dropout = dropout
        # After the activation is set: the default loss depends on it.
        if compile:
            self.compile()

    def get_config(self):
        return {
            **super().get_config(),
            "num_classes": self.num_classes,
            "activation": keras.activations.serialize(self.activation),
            "dropout": self.dropout,
        }
