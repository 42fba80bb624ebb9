"""Tiny backbones of every family, with random weights, and inputs for them."""

import keras
import numpy as np
from keras import ops
from keras_hub import models

from keras_efficient_attn.models.conversion.adapters import AttentionAdapter

BATCH, LENGTH = 2, 7
SIZES = dict(vocabulary_size=50, num_layers=2, hidden_dim=16, intermediate_dim=24)
STOCK = dict(**SIZES, num_heads=2, max_sequence_length=16)
GROUPED = dict(**SIZES, num_query_heads=2, num_key_value_heads=1)
ELECTRA = {name: size for name, size in STOCK.items() if name != "vocabulary_size"}
LOCAL = "local:window=64"
PERFORMER = "performer:window=64,num_features=4"

VISION = dict(
    image_shape=(6, 6, 3),
    patch_size=2,
    hidden_dim=16,
    num_layers=2,
    num_heads=2,
    intermediate_dim=24,
    name="vision",
)
CLIP_TEXT = dict(**STOCK, embedding_dim=16, name="text")

# The class, its arguments, and an attention that is exact up to 64 positions.
FAMILIES = {
    "bert": (models.BertBackbone, STOCK, PERFORMER),
    "roberta": (
        models.RobertaBackbone,
        STOCK,
        "vq:window=64,num_codes=2",
    ),
    "distil_bert": (models.DistilBertBackbone, STOCK, LOCAL),
    "electra": (
        models.ElectraBackbone,
        dict(**ELECTRA, vocab_size=50, embedding_dim=16),
        LOCAL,
    ),
    "gpt2": (models.GPT2Backbone, STOCK, PERFORMER),
    "opt": (models.OPTBackbone, STOCK, LOCAL),
    "bart": (models.BartBackbone, STOCK, LOCAL),
    "vit": (
        models.ViTBackbone,
        dict(
            image_shape=(6, 4, 3),
            patch_size=2,
            num_layers=2,
            num_heads=2,
            hidden_dim=16,
            mlp_dim=24,
        ),
        LOCAL,
    ),
    "llama": (
        models.LlamaBackbone,
        dict(**SIZES, num_query_heads=4, num_key_value_heads=2),
        PERFORMER,
    ),
    "mistral": (models.MistralBackbone, dict(**GROUPED, sliding_window=64), LOCAL),
    "qwen": (models.QwenBackbone, GROUPED, LOCAL),
    "gemma": (models.GemmaBackbone, dict(**GROUPED, head_dim=8), LOCAL),
    "gemma3": (
        models.Gemma3Backbone,
        dict(
            **GROUPED,
            image_size=4,
            head_dim=8,
            use_post_ffw_norm=True,
            use_post_attention_norm=True,
        ),
        PERFORMER,
    ),
    "qwen3": (models.Qwen3Backbone, dict(**GROUPED, head_dim=6), PERFORMER),
    "phi3": (models.Phi3Backbone, GROUPED, LOCAL),
    "mixtral": (
        models.MixtralBackbone,
        dict(**GROUPED, num_experts=2, sliding_window=64),
        LOCAL,
    ),
    "whisper": (
        models.WhisperBackbone,
        dict(
            **SIZES,
            num_heads=2,
            num_mels=4,
            max_encoder_sequence_length=16,
            max_decoder_sequence_length=16,
        ),
        LOCAL,
    ),
    "siglip_vision": (
        models.SigLIPVisionEncoder,
        dict(
            image_shape=(6, 6, 3),
            patch_size=2,
            num_layers=2,
            num_heads=2,
            hidden_dim=16,
            intermediate_dim=24,
        ),
        LOCAL,
    ),
    # Paths of their weights depend on their names.
    "clip_vision": (models.CLIPVisionEncoder, VISION, LOCAL),
    "clip_text": (models.CLIPTextEncoder, CLIP_TEXT, LOCAL),
    "clip": (
        models.CLIPBackbone,
        # Made anew for each model.
        dict(
            vision_encoder=lambda: models.CLIPVisionEncoder(
                **{**VISION, "num_layers": 1}
            ),
            text_encoder=lambda: models.CLIPTextEncoder(
                **{**CLIP_TEXT, "num_layers": 1}
            ),
            projection_dim=8,
        ),
        LOCAL,
    ),
    "t5": (models.T5Backbone, dict(**SIZES, num_heads=2), PERFORMER),
    "dinov2": (
        models.DINOV2Backbone,
        dict(
            image_shape=(6, 6, 3),
            position_embedding_shape=(6, 6, 3),
            patch_size=2,
            num_layers=2,
            num_heads=2,
            hidden_dim=16,
            intermediate_dim=24,
        ),
        LOCAL,
    ),
}


def make(name, **options):
    backbone_class, arguments, _ = FAMILIES[name]
    arguments = {k: v() if callable(v) else v for k, v in arguments.items()}
    return randomize(backbone_class(**{**arguments, **options}))


def randomize(model, seed=0):
    """Weights that make outputs differ between tokens, and nonzero biases."""
    random = np.random.default_rng(seed)
    for weight in model.weights:
        if not keras.backend.is_float_dtype(weight.dtype):
            continue
        scale = weight.shape[0] ** -0.5 if len(weight.shape) > 1 else 0.2
        scale = 1.0 if "embeddings" in weight.name else scale
        offset = 1.0 if weight.name in ("gamma", "scale") else 0.0
        weight.assign(offset + scale * random.normal(size=weight.shape))
    return model


def inputs(backbone, seed=0, padded=True):
    """One batch, whose first row ends in padding."""
    random = np.random.default_rng(seed)
    if not isinstance(backbone.input, dict):
        shape = (BATCH, *backbone.input.shape[1:])
        return random.normal(size=shape).astype("float32")
    made = {}
    for name, tensor in backbone.input.items():
        length = LENGTH - 2 if "decoder" in name else LENGTH
        if name in ("images", "encoder_features"):
            shape = (BATCH, *(length if n is None else n for n in tensor.shape[1:]))
            made[name] = random.normal(size=shape).astype("float32")
            continue
        made[name] = np.zeros((BATCH, length), "int32")
        if "token_ids" in name:
            made[name] = random.integers(1, 50, (BATCH, length)).astype("int32")
        elif "padding_mask" in name:
            made[name] += 1
            made[name][0, 4:] = 0 if padded else 1
    return made


def outputs(backbone, data):
    """Outputs at positions that are not padding, as a list of arrays.

    The output of a whole row is that of its first position.
    """
    output = backbone(data)
    named = output if isinstance(output, dict) else {"": output}
    arrays = []
    for name, value in named.items():
        value = ops.convert_to_numpy(ops.cast(value, "float32"))
        prefix = name.removesuffix("sequence_output")
        mask = data.get(f"{prefix}padding_mask") if isinstance(data, dict) else None
        if mask is None and isinstance(data, dict):
            mask = data.get("padding_mask")
        if mask is not None:
            mask = np.asarray(mask) > 0
            value = value[mask[:, 0] if value.ndim == 2 else mask]
        arrays.append(value)
    return arrays


def relative_error(new, old):
    """`√(Σ‖new − old‖² / Σ‖old‖²)` of arrays."""
    return np.sqrt(np.sum((new - old) ** 2) / np.sum(old**2))


def output_error(converted, backbone, data):
    """The relative error of a backbone's only output."""
    (new,), (old,) = (outputs(model, data) for model in (converted, backbone))
    return relative_error(new, old)


def assert_same_outputs(first, second, data, tolerance=1e-5):
    for old, new in zip(outputs(first, data), outputs(second, data), strict=True):
        np.testing.assert_allclose(new, old, rtol=0, atol=tolerance * np.max(abs(old)))


def assert_greedy(task, data, tokens, prefix=""):
    """Tokens of each row are its prompt's, then the likeliest of whole calls on them.

    The model is causal: one call on the result has the logits of every step. It is a
    call of the row alone, without padding.
    """
    given = data[f"{prefix}padding_mask"] > 0
    for row, mask in enumerate(given):
        prompt = data[f"{prefix}token_ids"][row][mask]
        made = tokens[row, len(prompt) :]
        np.testing.assert_array_equal(tokens[row, : len(prompt)], prompt)
        assert len(made)
        inputs = {name: array[row : row + 1] for name, array in data.items()} | {
            f"{prefix}token_ids": tokens[row : row + 1],
            f"{prefix}padding_mask": np.ones_like(tokens[row : row + 1]),
        }
        likeliest = ops.convert_to_numpy(task(inputs))[0].argmax(-1)
        np.testing.assert_array_equal(made, likeliest[len(prompt) - 1 : -1])


def efficient_layers(model):
    """The efficient layers that replaced a model's own, in order."""
    layers = model._flatten_layers()
    return [layer.attention for layer in layers if isinstance(layer, AttentionAdapter)]
