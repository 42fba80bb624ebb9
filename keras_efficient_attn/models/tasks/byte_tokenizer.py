"""Byte tokens."""

import keras
import keras_hub
import numpy as np

from keras_efficient_attn.models.backbone import EfficientTransformerBackbone

PAD, START, END, MASK = 0, 253, 254, 255


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class EfficientByteTokenizer(keras_hub.tokenizers.ByteTokenizer):
    """KerasHub's byte tokenizer with special tokens among its 256.

    Padding is 0, so that texts have no NUL characters. Start, end and mask are 253, 254
    and 255, bytes that never occur in UTF-8 text. By default text is not changed: case
    and Unicode form stay.

    Args:
        lowercase: Whether to fold case. Defaults to `False`.
        **kwargs: Arguments of `keras_hub.tokenizers.ByteTokenizer`.

    Raises:
        ValueError: From a call, for a text with a NUL character.

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

    def __init__(self, lowercase: bool = False, **kwargs):
        super().__init__(lowercase=lowercase, **kwargs)

    def tokenize(self, inputs):
        for text in keras.tree.flatten(inputs):
            # In `tf.data` a text has no value yet.
            if hasattr(text, "numpy"):
                text = text.numpy()
            texts = text.ravel().tolist() if isinstance(text, np.ndarray) else [text]
            for text in texts:
                nul = b"\0" if isinstance(text, bytes) else "\0"
                if isinstance(text, str | bytes) and nul in text:
                    raise ValueError(
                        "`inputs` must not have NUL characters, which are padding and "
                        f"would vanish: remove or replace them. Received: {text!r}"
                    )
        return super().tokenize(inputs)

    @property
    def special_token_ids(self):
        return [PAD, START, END, MASK]

    def save_assets(self, dir_path):
        """Does nothing: bytes need no vocabulary."""

    def load_preset_assets(self, preset):
        """Does nothing: bytes need no vocabulary."""
