"""A masked language model."""

import keras
import keras_hub

from keras_efficient_attn.models.backbone import EfficientTransformerBackbone
from keras_efficient_attn.models.tasks.byte_tokenizer import EfficientByteTokenizer
from keras_efficient_attn.models.tasks.task import TaskMixin
from keras_efficient_attn.models.tasks.text_classifier import without_segments


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class EfficientMaskedLMPreprocessor(keras_hub.models.MaskedLMPreprocessor):
    """Strings to tokens, some of them masked, with the masked tokens as labels.

    Args:
        tokenizer: A tokenizer.
        sequence_length: Tokens per row. Defaults to 512.
        mask_selection_length: Maximum number of masked tokens per row. Defaults to 96.
        **kwargs: Arguments of `keras_hub.models.MaskedLMPreprocessor`.

    Example:

    ```python
    from keras_efficient_attn.models import (
        EfficientByteTokenizer,
        EfficientMaskedLMPreprocessor,
    )

    preprocessor = EfficientMaskedLMPreprocessor(
        EfficientByteTokenizer(), sequence_length=64, mask_selection_length=12
    )
    x, y, sample_weight = preprocessor(["some text", "more of it"])
    ```
    """

    backbone_cls = EfficientTransformerBackbone
    tokenizer_cls = EfficientByteTokenizer

    def call(self, x, y=None, sample_weight=None):
        return without_segments(super().call(x, y, sample_weight))


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class EfficientMaskedLM(TaskMixin, keras_hub.models.MaskedLM):
    """Masked language model: predicts the tokens that were masked.

    Args:
        backbone: An `EfficientTransformerBackbone` with `architecture="encoder"`.
        preprocessor: An `EfficientMaskedLMPreprocessor`, or `None` for inputs that
            are dicts of `token_ids`, `padding_mask` and `mask_positions`.
        **kwargs: Arguments of KerasHub's tasks.

    Returns:
        On a call, logits `(batch, mask_selection_length, vocabulary_size)`.

    Raises:
        ValueError: If the backbone is not an encoder, or has concatenated streams.

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
    preprocessor = models.EfficientMaskedLMPreprocessor(
        models.EfficientByteTokenizer(), sequence_length=100, mask_selection_length=20
    )
    model = models.EfficientMaskedLM(backbone, preprocessor)
    model.fit(["The quick brown fox.", "The lazy dog."])
    ```

    Reference:
        - [Devlin et al., 2019](https://arxiv.org/abs/1810.04805)
    """

    backbone_cls = EfficientTransformerBackbone
    preprocessor_cls = EfficientMaskedLMPreprocessor

    def __init__(self, backbone, preprocessor=None, **kwargs):
        self.set_parts(backbone, preprocessor, "encoder")
        width = backbone.output.shape[-1]
        if width != backbone.token_embedding.output_dim:
            raise ValueError(
                "EfficientMaskedLM needs a backbone whose output is as wide as its "
                "embedding: `backbone` must have streams='mean'. Received: output "
                f"width {width}, hidden_dim={backbone.token_embedding.output_dim}"
            )
        inputs = {
            **backbone.input,
            "mask_positions": keras.Input(
                (None,), dtype="int32", name="mask_positions"
            ),
        }
        hidden = backbone(backbone.input)
        outputs = keras_hub.layers.MaskedLMHead(
            token_embedding=backbone.token_embedding,
            intermediate_activation="gelu",
            dtype=backbone.dtype_policy,
            name="masked_lm_head",
        )(hidden, mask_positions=inputs["mask_positions"])
        super().__init__(inputs=inputs, outputs=outputs, **kwargs)
