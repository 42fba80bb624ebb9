"""Byte tokens."""

import keras
import keras_hub

from keras_efficient_attn.models.backbone import EfficientTransformerBackbone

PAD, START, END, MASK = 0, 253, 254, 255


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class EfficientByteTokenizer(keras_hub.tokenizers.ByteTokenizer):
    """KerasHub's byte tokenizer with special tokens among its 256.

    Padding is 0. Start, end and mask are 253, 254 and 255, bytes that never occur in
    UTF-8 text. By default text is not changed: case and Unicode form stay.

    Args:
        lowercase: Whether to fold case. Defaults to `False`.
        **kwargs: Arguments of `keras_hub.tokenizers.ByteTokenizer`.

    Example:

    >>> from keras_efficient_attn.models import EfficientByteTokenizer
    >>> tokenizer = EfficientByteTokenizer()
    >>> [int(token) for token in tokenizer("Hé")]
    [72, 195, 169]
    """

    backbone_cls = EfficientTransformerBackbone

    pad_token_id = PAD
    start_token_id = START
    end_token_id = END
    mask_token_id = MASK

    def __init__(self, lowercase=False, **kwargs):
        super().__init__(lowercase=lowercase, **kwargs)

    @property
    def special_token_ids(self):
        return [PAD, START, END, MASK]

    def save_assets(self, dir_path):
        """Does nothing: bytes need no vocabulary."""

    def load_preset_assets(self, preset):
        """Does nothing: bytes need no vocabulary."""
