"""The language model of `--model`: a small one of `keras_efficient_attn.models`."""

import keras
from keras import ops

from keras_efficient_attn.benchmark.layer_figures import (
    decode_operations,
    layer_operations,
)
from keras_efficient_attn.models import EfficientCausalLM, EfficientTransformerBackbone

VOCABULARY = 256
BLOCKS = 2
EXPANSION = 4


def make_model(attention, num_heads, head_dim, dtype):
    """An `EfficientCausalLM` on bytes.

    It has no positions; no time depends on them.

    Args:
        attention: Identifier of `get_attention`.
        num_heads: Number of heads.
        head_dim: Size of a head; the model is `num_heads · head_dim` wide.
        dtype: Keras dtype policy.
    """
    width = num_heads * head_dim
    backbone = EfficientTransformerBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=BLOCKS,
        num_heads=num_heads,
        hidden_dim=width,
        intermediate_dim=EXPANSION * width,
        attention=attention,
        dtype=dtype,
    )
    return EfficientCausalLM(backbone, dtype=dtype)


def make_optimizer(model):
    """Adam for the model's weights."""
    # The default epsilon is zero in float16.
    optimizer = keras.optimizers.Adam(epsilon=1e-3)
    optimizer.build(model.trainable_variables)
    return optimizer


def next_token_loss(model, tokens, targets, training=False):
    """Mean cross-entropy in nats.

    Without a padding mask, so that softmax attention has its causal kernel.
    """
    backbone = model.backbone
    hidden = backbone.embedding(tokens, training=training)
    hidden = backbone.decoder(hidden, training=training)
    logits = backbone.token_embedding(hidden, reverse=True)
    return ops.mean(
        keras.losses.sparse_categorical_crossentropy(targets, logits, from_logits=True)
    )


def stream(model, tokens, state):
    """`(logits, state)` of the next tokens of a sequence."""
    hidden, state = model.backbone.stream(tokens, state)
    logits = model.backbone.token_embedding(hidden, reverse=True)
    return logits, state


def model_operations(model, batch, length):
    """Useful operations of a forward pass, or `None`."""
    counts = [
        layer_operations(attention, batch, length, causal=True)
        for attention in _attentions(model)
    ]
    return _with_dense(model, counts, batch * length)


def model_decode_operations(model, batch, length):
    """Useful operations of one more position, or `None`."""
    counts = [
        decode_operations(attention, batch, length) for attention in _attentions(model)
    ]
    return _with_dense(model, counts, batch)


def _attentions(model):
    return [block.attention for block in model.backbone.transformer_layers]


def _with_dense(model, counts, positions):
    if None in counts:
        return None
    width = model.backbone.hidden_dim
    dense = BLOCKS * 4 * EXPANSION * width**2 + 2 * width * VOCABULARY
    return sum(counts) + positions * dense
