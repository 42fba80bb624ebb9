"""A sequence-to-sequence language model that caches its decoder's states."""

import keras
import keras_hub

from keras_efficient_attn.models.backbone import EfficientTransformerBackbone
from keras_efficient_attn.models.files import preset_path
from keras_efficient_attn.models.tasks.byte_tokenizer import EfficientByteTokenizer
from keras_efficient_attn.models.tasks.task import StreamingMixin, TaskMixin
from keras_efficient_attn.ops.common.backend import shape_of


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class EfficientSeq2SeqLMPreprocessor(keras_hub.models.Seq2SeqLMPreprocessor):
    """Pairs of strings to the inputs of encoder and decoder, and the next tokens.

    Args:
        tokenizer: A tokenizer.
        encoder_sequence_length: Tokens per encoder row, start and end included.
            Defaults to 1024.
        decoder_sequence_length: Tokens per decoder row. Defaults to 1024.
        **kwargs: Arguments of `keras_hub.models.Seq2SeqLMPreprocessor`.

    Example:

    ```python
    from keras_efficient_attn.models import (
        EfficientByteTokenizer,
        EfficientSeq2SeqLMPreprocessor,
    )

    preprocessor = EfficientSeq2SeqLMPreprocessor(
        EfficientByteTokenizer(), encoder_sequence_length=16, decoder_sequence_length=8
    )
    x, y, sample_weight = preprocessor(
        {"encoder_text": ["some text"], "decoder_text": ["texte"]}
    )
    ```
    """

    backbone_cls = EfficientTransformerBackbone
    tokenizer_cls = EfficientByteTokenizer

    def get_config(self):
        # KerasHub's class omits these arguments.
        return {
            **super().get_config(),
            "encoder_sequence_length": self.encoder_sequence_length,
            "decoder_sequence_length": self.decoder_sequence_length,
        }


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class EfficientSeq2SeqLM(StreamingMixin, TaskMixin, keras_hub.models.Seq2SeqLM):
    """Encoder and decoder, with KerasHub's `generate`.

    ```
    memory = encoder(encoder_token_ids)
    logits[t] = decoder(decoder_token_ids[..t], memory)
    ```

    `generate` computes `memory` once. It reads the decoder's prompts in segments, then
    one token at a time, with the states of the decoder's layers as its cache
    (`EfficientCausalLM`). A token has constant cost, except with layers whose state
    grows. Up to rounding, calls on the whole sequences give the same tokens. Prompts of
    a batch may have different lengths.

    Args:
        backbone: An `EfficientTransformerBackbone` with
            `architecture="encoder_decoder"`.
        preprocessor: An `EfficientSeq2SeqLMPreprocessor`, or `None` for inputs that are
            dicts of `encoder_token_ids`, `encoder_padding_mask`, `decoder_token_ids`
            and `decoder_padding_mask`, `(batch, length)`.
        **kwargs: Arguments of KerasHub's tasks.

    Returns:
        On a call, float32 logits `(batch, decoder_length, vocabulary_size)`.

    Raises:
        ValueError: If the backbone is not an encoder-decoder; from `generate`, if one
            of the decoder's layers does not stream.

    Example:

    ```python
    from keras_efficient_attn import models

    backbone = models.EfficientTransformerBackbone(
        vocabulary_size=256,
        num_layers=2,
        num_heads=4,
        hidden_dim=64,
        intermediate_dim=256,
        architecture="encoder_decoder",
        positions="sinusoidal",
    )
    preprocessor = models.EfficientSeq2SeqLMPreprocessor(
        models.EfficientByteTokenizer(),
        encoder_sequence_length=20,
        decoder_sequence_length=20,
    )
    model = models.EfficientSeq2SeqLM(backbone, preprocessor)
    model.fit({"encoder_text": ["one", "two"], "decoder_text": ["eno", "owt"]})
    model.generate(["three", "four"])
    ```

    Reference:
        - [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762)
    """

    # KerasHub's `CausalLM.from_preset` searches its subclasses, in no particular order,
    # for a task of the backbone's class. It must find `EfficientCausalLM`, not this
    # class.
    backbone_cls = None
    preprocessor_cls = EfficientSeq2SeqLMPreprocessor

    def __init__(self, backbone, preprocessor=None, **kwargs):
        self.set_parts(backbone, preprocessor, "encoder_decoder")
        inputs = backbone.input
        hidden = backbone(inputs)["decoder_sequence_output"]
        outputs = backbone.token_embedding(hidden, reverse=True)
        super().__init__(inputs=inputs, outputs=outputs, **kwargs)

    @classmethod
    def from_preset(cls, preset, load_weights=True, **kwargs):
        """A model from a preset.

        Args:
            preset: A name of `preset_names()`, with `load_weights=False`, or a folder
                that `save_to_preset` wrote.
            load_weights: Whether to load weights, or leave them random. Defaults to
                `True`.
            **kwargs: `preprocessor`, which defaults to the preset's and is required if
                the configuration has no tokenizer (`None` for token ids), and arguments
                of the backbone that override the preset's.

        Raises:
            ValueError: If the preset does not exist, is not an encoder-decoder, or has
                no weights to load.
            FileNotFoundError: If the preset has no tokenizer and no `preprocessor` is
                given.
        """
        if "preprocessor" in kwargs:
            preprocessor = kwargs.pop("preprocessor")
        else:
            preprocessor = cls.preprocessor_cls.from_preset(preset_path(preset))
        backbone = EfficientTransformerBackbone.from_preset(
            preset, load_weights, **kwargs
        )
        return cls(backbone, preprocessor)

    def get_initial_cache(self, encoder_token_ids, encoder_padding_mask, max_length):
        """The cache before the decoder's first token, with the encoder's output.

        Args:
            encoder_token_ids: Integers `(batch, encoder_length)`.
            encoder_padding_mask: `(batch, encoder_length)`, 0 at padding.
            max_length: Decoder tokens that the cache can hold, for layers whose state
                grows; `None` for other layers.

        Returns:
            Dict of `state`, the decoder's, `position` `(batch,)`, the number of tokens
            read, `memory` `(batch, encoder_length, hidden_dim)` and
            `memory_padding_mask`.
        """
        batch_size = shape_of(encoder_token_ids)[0]
        return {
            **super().get_initial_cache(batch_size, max_length),
            "memory": self.backbone.encode(encoder_token_ids, encoder_padding_mask),
            "memory_padding_mask": encoder_padding_mask,
        }

    def generate_step(self, inputs, stop_token_ids=None):
        """Generates for one batch; compiled where the backend compiles.

        Args:
            inputs: Dict of `encoder_token_ids` and `encoder_padding_mask`, `(batch,
                encoder_length)`, `decoder_token_ids` and `decoder_padding_mask`,
                `(batch, max_length)`.
            stop_token_ids: Optional; generation ends when each row has had one.

        Returns:
            A dict with the decoder's two entries.
        """
        token_ids, padding_mask = self.complete(
            inputs["decoder_token_ids"],
            inputs["decoder_padding_mask"],
            self.get_initial_cache(
                inputs["encoder_token_ids"],
                inputs["encoder_padding_mask"],
                shape_of(inputs["decoder_token_ids"])[1],
            ),
            stop_token_ids,
            lambda: self.backbone(inputs)["decoder_sequence_output"],
        )
        return {"decoder_token_ids": token_ids, "decoder_padding_mask": padding_mask}
