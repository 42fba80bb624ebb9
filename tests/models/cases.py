"""The configurations of all model tests, and random weights."""

import functools

import keras
import numpy as np
from keras import ops

from keras_efficient_attn.models import (
    EfficientByteTokenizer,
    EfficientCausalLM,
    EfficientMaskedLM,
    EfficientSeq2SeqLM,
    EfficientTextClassifier,
    EfficientTransformerBackbone,
    EmbeddingOptions,
    FeedForwardOptions,
    PositionOptions,
    RecurrenceOptions,
    ResidualOptions,
)

SIZES = dict(
    vocabulary_size=50, num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=12
)
ELU = "performer:feature_map=elu,chunk_size=4"


@keras.saving.register_keras_serializable(package="tests")
class PreviousToken(keras.layers.Embedding):
    """A streaming token feature: the embedding of the previous token."""

    def get_initial_state(self, batch_size):
        return ops.zeros((batch_size, 1), "int32")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.supports_masking = True

    def call(self, tokens, mask=None, state=None):
        before = ops.zeros_like(tokens[:, :1]) if state is None else state
        tokens = ops.concatenate([ops.cast(before, tokens.dtype), tokens], axis=1)
        output = super().call(tokens[:, :-1])
        if state is None:
            return output
        last = ops.shape(tokens)[1] - 1
        if mask is not None:
            last = ops.sum(ops.cast(mask, "int32"), axis=1, keepdims=True)
            return output, ops.take_along_axis(tokens, last, axis=1)
        return output, tokens[:, last:]

    def compute_output_shape(self, input_shape):
        return (*input_shape, self.output_dim)


# Decoders for generation; together they cover every argument of the backbone.
DECODERS = {
    "defaults": dict(attention="performer:num_features=8,chunk_size=4"),
    "mixed-rotary": dict(
        num_layers=2,
        attention=[ELU, "softmax"],
        positions="rotary",
        residual="post_norm",
    ),
    "bytes": dict(
        attention=ELU,
        convolution=3,
        feed_forward="squared_relu",
        use_bias=False,
        embedding=EmbeddingOptions(
            "untied", features=(PreviousToken(256, 8), PreviousToken(256, 8))
        ),
    ),
    "recurrent": dict(
        attention="vq:num_codes=4,window=3,block_length=4",
        recurrence=2,
        positions=PositionOptions("learned", max_length=32, each_layer=True),
        residual=ResidualOptions(norm="rms_norm"),
        feed_forward=FeedForwardOptions("silu", gated=True),
    ),
    "softmax": dict(
        attention="softmax:sliding_window=5",
        positions="sinusoidal",
        embedding=EmbeddingOptions(scale=True),
        head_dim=6,
    ),
    "reversible": dict(
        num_layers=2,
        attention="reformer:bucket_size=16,num_buckets=2,num_hashes=4",
        residual="reversible",
        positions="sinusoidal",
        feed_forward={"chunk_size": 4},
    ),
    "two-residuals": dict(
        num_layers=3,
        attention=[ELU, "gated-delta:num_value_heads=4,convolution=None"],
        residual=ResidualOptions(("pre_norm", "update_norm"), norm="rms_norm"),
        feed_forward=FeedForwardOptions("silu", gated=True),
    ),
    "two-streams": dict(
        num_layers=2,
        attention="reformer:bucket_size=16,num_buckets=2,num_hashes=4",
        residual=ResidualOptions("reversible", streams="concatenated"),
        embedding=EmbeddingOptions("untied", output_bias=True),
    ),
    "universal": dict(
        attention=ELU,
        recurrence=RecurrenceOptions(
            3, "learned", {"ponder_cost": 0.1, "halting_bias": -0.5}
        ),
        positions=PositionOptions("sinusoidal", each_layer=True, max_offset=9),
        feed_forward=FeedForwardOptions(separable_convolution=True),
        residual="post_norm",
    ),
}
CASES = {
    **DECODERS,
    "encoder": dict(
        num_layers=2, attention=[ELU, "softmax"], architecture="encoder", dropout=0.1
    ),
    "encoder-decoder": dict(
        attention=ELU,
        architecture="encoder_decoder",
        cross_attention="softmax",
        positions="sinusoidal",
    ),
}


# Each task, the name of its backbone, and options.
IMAGE = dict(
    attention="local:query_block=(2,2),memory=(1,1),grid=(4,4),grid_order=block",
    positions=PositionOptions("axial", shape=(4, 4)),
)
TASKS = {
    "causal-lm": (EfficientCausalLM, "mixed-rotary", {}),
    "image-lm": (EfficientCausalLM, "softmax", IMAGE),
    "classifier": (
        functools.partial(EfficientTextClassifier, num_classes=3),
        "encoder",
        {},
    ),
    "masked-lm": (EfficientMaskedLM, "encoder", {}),
    "seq2seq": (EfficientSeq2SeqLM, "encoder-decoder", {}),
}


def make_task(name, batch=2, **options):
    """A task, its inputs, and integer targets; `options` are the backbone's."""
    make, backbone, own = TASKS[name]
    task, x = make(make_backbone(backbone, **own, **options)), inputs(backbone, batch)
    random = np.random.default_rng(1)
    if name == "masked-lm":
        x["mask_positions"] = random.integers(0, 9, (batch, 3)).astype("int32")
    *shape, classes = task(x).shape
    return randomize(task), x, random.integers(classes, size=shape)


def make_backbone(name, **options):
    """A backbone with weights that make its outputs differ between tokens."""
    backbone = EfficientTransformerBackbone(**{**SIZES, **CASES[name], **options})
    return randomize(backbone)


def randomize(model, seed=0):
    random = np.random.default_rng(seed)
    for weight in model.trainable_weights:
        noise = random.normal(size=weight.shape)
        if "norm" in weight.path and weight.name in ("gamma", "scale"):
            weight.assign(1.0 + 0.1 * noise)
        else:
            fan_in = weight.shape[0] if len(weight.shape) > 1 else 25
            scale = 1.0 if "embeddings" in weight.name else fan_in**-0.5
            weight.assign(scale * noise)
    return model


def inputs(name, batch=2, length=13, seed=0):
    """Model inputs whose first row ends in padding."""
    random = np.random.default_rng(seed)

    def sequence(prefix, length):
        mask = np.ones((batch, length), "int32")
        mask[0, length - 3 :] = 0
        tokens = random.integers(1, 50, (batch, length)).astype("int32") * mask
        return {f"{prefix}token_ids": tokens, f"{prefix}padding_mask": mask}

    if CASES[name].get("architecture") == "encoder_decoder":
        return sequence("encoder_", length) | sequence("decoder_", length - 4)
    return sequence("", length)


def prompts(lengths, length, starts=0):
    """Prompts of these lengths from their starts on, in rows of `length`.

    Tokens before and after a prompt are padding, whatever they are.
    """
    places = np.arange(length) - np.broadcast_to(starts, len(lengths))[:, None]
    mask = (places >= 0) & (places < np.array(lengths)[:, None])
    tokens = np.random.default_rng(1).integers(1, 50, mask.shape)
    return {"token_ids": tokens.astype("int32"), "padding_mask": mask.astype("int32")}


def calibrate(model, mode):
    """Quantises a model by `"gptq"` or `"awq"` on random tokens."""
    config_class = {
        "gptq": keras.quantizers.GPTQConfig,
        "awq": keras.quantizers.AWQConfig,
    }[mode]
    config = config_class(
        dataset=np.random.default_rng(0).integers(1, 50, (40, 16)),
        tokenizer=EfficientByteTokenizer(),
        num_samples=4,
        sequence_length=12,
        # Keras' small groups are wrong on PyTorch, in KerasHub's models as well.
        group_size=-1,
    )
    model.quantize(mode, config=config)
