"""The model whose attention is swapped: a preset, or a small encoder trained here."""

import dataclasses

import keras
import keras_hub
import numpy as np

from command_line import UsageError
from keras_efficient_attn.models import EfficientByteTokenizer

# The first available class of these makes a backbone's inputs from texts.
PREPROCESSORS = (
    keras_hub.models.TextClassifierPreprocessor,
    keras_hub.models.MaskedLMPreprocessor,
    keras_hub.models.CausalLMPreprocessor,
)
# Sizes of the small encoder.
SIZES = dict(num_layers=4, num_heads=4, hidden_dim=128, intermediate_dim=512)
MASKED_SHARE = 0.15


@dataclasses.dataclass(frozen=True)
class Original:
    """A backbone with softmax attention.

    Attributes:
        backbone: The backbone.
        preprocessor: Converts texts to the backbone's inputs.
        text_bytes: Bytes of text that suffice to fill the length.
    """

    backbone: keras_hub.models.Backbone
    preprocessor: keras_hub.models.Preprocessor
    text_bytes: int

    def inputs_of(self, texts):
        """The backbone's inputs for a list of texts, a dict of arrays."""
        if hasattr(self.preprocessor, "generate_preprocess"):
            made = self.preprocessor.generate_preprocess(texts)
        else:
            made = keras.utils.unpack_x_y_sample_weight(self.preprocessor(texts))[0]
        names = set(self.backbone.input)
        return {k: v for k, v in _integers(made).items() if k in names}


def load(preset, length):
    """A backbone and its preprocessing, from a preset.

    Args:
        preset: The name of a preset, or a folder in the format of KerasHub or of
            Hugging Face.
        length: Tokens per text.

    Raises:
        UsageError: If it cannot be loaded, or cannot preprocess texts.
    """
    try:
        backbone = keras_hub.models.Backbone.from_preset(preset)
    except Exception as error:
        raise UsageError(f"--preset {preset}: {error}") from error
    most = getattr(backbone, "max_sequence_length", None)
    if most is not None and length > most:
        raise UsageError(
            f"--length must be at most {most}, the number of positions of {preset}; "
            f"received --length {length}"
        )
    # Tokens are rarely longer.
    return Original(backbone, _preprocessor(preset, length), 8 * length)


def train(splits, length, steps, batch, seed, verbose):
    """A small encoder of bytes, trained to predict masked bytes.

    Args:
        splits: From `byte_lm.data.load_splits`.
        length: Tokens per text.
        steps: Training steps.
        batch: Texts in a batch.
        seed: Seed of weights, texts and masks.
        verbose: As for `keras.Model.fit`.
    """
    keras.utils.set_random_seed(seed)
    tokenizer = EfficientByteTokenizer()
    masking = keras_hub.models.MaskedLMPreprocessor(
        tokenizer,
        sequence_length=length,
        mask_selection_rate=MASKED_SHARE,
        mask_selection_length=max(1, int(length * MASKED_SHARE)),
    )
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=tokenizer.vocabulary_size(),
        max_sequence_length=length,
        dropout=0.0,
        **SIZES,
    )

    def masked_batches():
        for texts in batches(splits["train"], batch, length, seed):
            inputs, *targets = masking(texts)
            yield _integers(inputs), *map(np.asarray, targets)

    task = keras_hub.models.BertMaskedLM(backbone)
    # KerasHub's tasks cannot be fitted to generators.
    model = keras.Model(task.input, task.output)
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3, clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
        jit_compile=keras.backend.backend() != "torch",
    )
    history = model.fit(
        masked_batches(), steps_per_epoch=steps, epochs=1, verbose=verbose
    ).history
    loss, right = history["loss"][-1], history["accuracy"][-1]
    print(
        f"trained a small encoder of bytes: {steps} steps, loss {loss:.2f}, "
        f"{right:.1%} of masked bytes right",
        flush=True,
    )
    plain = keras_hub.models.TextClassifierPreprocessor(
        tokenizer, sequence_length=length
    )
    return Original(backbone, plain, length)


def batches(data, batch, size, seed):
    """Endless lists of texts; the last quarter of each list is shorter.

    Args:
        data: A uint8 array of UTF-8 text.
        batch: Texts in a list.
        size: Maximum bytes per text.
        seed: Seed of the texts' positions.
    """
    random = np.random.default_rng(seed)
    while True:
        texts = []
        for index in range(batch):
            whole = index < batch - batch // 4
            length = size if whole else random.integers(1, size + 1)
            start = random.integers(0, max(1, len(data) - length))
            text = bytes(data[start : start + length]).decode(errors="ignore")
            texts.append(text)
        yield texts


def _integers(inputs):
    return {name: np.asarray(value, "int32") for name, value in inputs.items()}


def _preprocessor(preset, length):
    reasons = []
    for kind in PREPROCESSORS:
        try:
            return kind.from_preset(preset, sequence_length=length)
        except Exception as error:
            reasons.append(f"{kind.__name__}: {error}")
    raise UsageError(
        f"--preset {preset} has no preprocessor of texts. {'; '.join(reasons)}"
    )
