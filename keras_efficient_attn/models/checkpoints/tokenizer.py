"""The tokenizer of a checkpoint: `tokenizer.json`, or a SentencePiece model."""

import numbers
from pathlib import Path

import keras
import keras_hub
import numpy as np

from keras_efficient_attn.layers.arguments import KeepsArguments
from keras_efficient_attn.models.backbone import EfficientTransformerBackbone
from keras_efficient_attn.models.keras_hub_internals import preset_file

FILE, SENTENCE_PIECE = "tokenizer.json", "tokenizer.model"


class SpecialTokens(KeepsArguments):
    """Mixin of a KerasHub tokenizer whose special tokens are known by number.

    Args:
        start_token_id, end_token_id: Of the tokens around a text, or `None`.
        pad_token_id: Of padding. Defaults to 0.
        **kwargs: Arguments of the tokenizer.
    """

    backbone_cls = EfficientTransformerBackbone

    def __init__(
        self, start_token_id=None, end_token_id=None, pad_token_id=0, **kwargs
    ):
        super().__init__(**kwargs)
        self.keep(locals())

    @property
    def special_token_ids(self):
        ends = self.start_token_id, self.end_token_id
        return [token for token in ends if token is not None]


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class SentencePieceFileTokenizer(
    SpecialTokens, keras_hub.tokenizers.SentencePieceTokenizer
):
    """KerasHub's tokenizer, of a `tokenizer.model`."""


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class JsonFileTokenizer(SpecialTokens, keras_hub.tokenizers.Tokenizer):
    """A `tokenizer.json`, by the package `tokenizers`.

    Args:
        file: Path of the file; `None` if it is loaded later, as from an archive.
        **kwargs: As `SpecialTokens`.

    Raises:
        ImportError: If `tokenizers` is not installed.
    """

    def __init__(self, file=None, dtype="int32", **kwargs):
        super().__init__(dtype=dtype, **kwargs)
        self.file_assets = [FILE]
        if file is not None:
            self._set_file(file)

    def _set_file(self, path):
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError(
                f"{FILE} needs the package tokenizers: pip install tokenizers"
            ) from error
        self.text = Path(path).read_text(encoding="utf-8")
        self._tokenizer = tokenizers.Tokenizer.from_str(self.text)
        # The model's texts have their own lengths.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    @property
    def begins_texts(self):
        """Whether the file puts the start token before every text."""
        return self._tokenizer.encode("").ids[:1] == [self.start_token_id]

    def tokenize(self, inputs):
        if hasattr(inputs, "graph") and not hasattr(inputs, "numpy"):
            return self._tokenize_in_graph(inputs)
        inputs = inputs.numpy() if hasattr(inputs, "numpy") else inputs
        inputs = inputs.tolist() if isinstance(inputs, np.ndarray) else inputs
        if isinstance(inputs, str | bytes):
            return self._ids([inputs])[0]
        return self._ids(inputs)

    def _ids(self, texts):
        texts = [text.decode() if isinstance(text, bytes) else text for text in texts]
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [list(row.ids) for row in encoded]

    def _tokenize_in_graph(self, inputs):
        """The tokens of a dataset's texts, which TensorFlow maps by a graph."""
        import tensorflow as tf

        def read(texts):
            rows = self._ids(np.ravel(texts).tolist())
            lengths = np.array([len(row) for row in rows], "int64")
            return np.array(sum(rows, []), "int32"), lengths

        flat, lengths = tf.numpy_function(read, [inputs], [tf.int32, tf.int64])
        flat.set_shape((None,))
        lengths.set_shape((None,))
        if inputs.shape.rank == 0:
            return flat
        return tf.RaggedTensor.from_row_lengths(flat, lengths)

    def call(self, inputs, *args, training=None, **kwargs):
        return self.tokenize(inputs)

    def detokenize(self, inputs):
        inputs = inputs.to_list() if hasattr(inputs, "to_list") else inputs
        if not isinstance(inputs, list):
            inputs = np.asarray(inputs).tolist()
        if inputs and isinstance(inputs[0], numbers.Integral):
            return self._tokenizer.decode(inputs)
        return self._tokenizer.decode_batch(inputs)

    def vocabulary_size(self):
        return self._tokenizer.get_vocab_size()

    def id_to_token(self, id):
        return self._tokenizer.id_to_token(id)

    def token_to_id(self, token):
        return self._tokenizer.token_to_id(token)

    def get_vocabulary(self):
        return [self.id_to_token(id) for id in range(self.vocabulary_size())]

    def save_assets(self, dir_path):
        Path(dir_path, FILE).write_text(self.text, encoding="utf-8")

    def load_assets(self, dir_path):
        self._set_file(Path(dir_path, FILE))


def read_tokenizer(preset, config):
    """The tokenizer of a checkpoint, or `None`.

    Args:
        preset: A folder or a handle.
        config: Dict, its `config.json`, with the numbers of special tokens.
    """
    end = config.get("eos_token_id")
    tokens = dict(
        start_token_id=config.get("bos_token_id"),
        end_token_id=end[0] if isinstance(end, list) else end,
        pad_token_id=config.get("pad_token_id") or 0,
    )
    for name, make in (
        (FILE, lambda path: JsonFileTokenizer(path, **tokens)),
        (SENTENCE_PIECE, lambda path: SentencePieceFileTokenizer(proto=path, **tokens)),
    ):
        try:
            path = preset_file(preset, name)
        except FileNotFoundError:
            continue
        return make(path)
    return None


def write_tokenizer(tokenizer, folder):
    """Writes the file of a tokenizer that `read_tokenizer` made; others have none."""
    if isinstance(tokenizer, JsonFileTokenizer):
        tokenizer.save_assets(folder)
    if isinstance(tokenizer, SentencePieceFileTokenizer):
        Path(folder, SENTENCE_PIECE).write_bytes(tokenizer.proto)


def preprocessor_of(cls, preset, config):
    """A preprocessor with the checkpoint's tokenizer, or `None` if it has none.

    Args:
        cls: The class of the preprocessor.
        preset: A folder or a handle.
        config: Dict, its `config.json`.
    """
    tokenizer = read_tokenizer(preset, config)
    if tokenizer is None:
        return None
    if not getattr(tokenizer, "begins_texts", True):
        # KerasHub's `generate` adds a start token wherever the tokenizer has one.
        tokenizer.start_token_id = None
    return cls(
        tokenizer,
        add_start_token=tokenizer.start_token_id is not None,
        add_end_token=tokenizer.end_token_id is not None,
    )


def without_tokenizer(inputs):
    """Raises `ValueError` for texts of a model that has no tokenizer."""
    texts = inputs if isinstance(inputs, list | tuple) else [inputs]
    if texts and isinstance(texts[0], str):
        raise ValueError(
            "Texts need a tokenizer: the folder of a checkpoint must have "
            f"{FILE} or {SENTENCE_PIECE}, or give `preprocessor`. Without one, pass "
            "a dict of `token_ids` and `padding_mask`. Received: "
            f"inputs={inputs!r}"
        )
