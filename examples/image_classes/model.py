"""A small vision Transformer like DeiT."""

import keras
from keras import ops

from command_line import UsageError, check_heads
from keras_efficient_attn.layers import get_attention
from keras_efficient_attn.models import FeedForward, TransformerBlock, TransformerStack


class ClassTokenAndPositions(keras.layers.Layer):
    """Prepends a learned token and adds a learned vector to each position."""

    def build(self, x_shape):
        _, length, dim = x_shape
        initializer = keras.initializers.TruncatedNormal(stddev=0.02)
        self.token = self.add_weight(shape=(1, 1, dim), initializer=initializer)
        self.positions = self.add_weight(
            shape=(1, length + 1, dim), initializer=initializer
        )

    def call(self, x):
        token = ops.broadcast_to(self.token, (ops.shape(x)[0], 1, x.shape[-1]))
        return ops.concatenate([token, x], axis=1) + self.positions


def build_model(attention, image_shape, classes, arguments):
    """A compiled classifier.

    Args:
        attention: As for `--attention`.
        image_shape: `(height, width, channels)`.
        classes: Number of classes.
        arguments: With `patch`, `layers`, `dim`, `heads`, `dropout`, `learning_rate`
            and `steps`, the number of training steps.

    Raises:
        UsageError: If no such model exists.
    """
    height, width, channels = image_shape
    patch, dim, heads = arguments.patch, arguments.dim, arguments.heads
    if height % patch or width % patch:
        raise UsageError(
            f"--patch must divide the images' {height} by {width} pixels; received "
            f"--patch {patch}"
        )
    check_heads(dim, heads)
    try:
        attentions = [
            get_attention(attention, num_heads=heads, key_dim=dim // heads)
            for _ in range(arguments.layers)
        ]
    except ValueError as error:
        raise UsageError(f"--attention {error}") from error
    images = keras.Input(image_shape)
    # A convolution with stride equal to its size: a linear map of each patch.
    x = keras.layers.Conv2D(dim, patch, strides=patch)(images)
    x = keras.layers.Reshape((-1, dim))(x)
    x = ClassTokenAndPositions()(x)
    blocks = [
        TransformerBlock(
            layer, FeedForward(4 * dim), causal=False, dropout=arguments.dropout
        )
        for layer in attentions
    ]
    x = TransformerStack(blocks, name="blocks")(x)
    model = keras.Model(images, keras.layers.Dense(classes)(x[:, 0]))
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0,
        max(1, arguments.steps - arguments.steps // 10),
        warmup_target=arguments.learning_rate,
        warmup_steps=max(1, arguments.steps // 10),
    )
    model.compile(
        keras.optimizers.AdamW(schedule, weight_decay=0.05),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def attention_maps(model, images):
    """The attention matrices of every block.

    Args:
        model: From `build_model`.
        images: `(count, height, width, channels)`.

    Returns:
        List of arrays `(count, heads, tokens, tokens)`, one per block.
    """
    stack = model.get_layer("blocks")
    x = keras.Model(model.input, stack.input)(images)
    maps = []
    for block in stack.blocks:
        h = block.attention_residual.before(x)
        _, scores = block.attention(h, h, return_attention_scores=True)
        maps.append(ops.convert_to_numpy(scores))
        x = block(x)
    return maps
