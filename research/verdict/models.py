"""The plain model, and its training."""

import keras

from byte_lm.model import trained_parameters
from keras_efficient_attn.models import EfficientTransformerBackbone
from verdict.candidates import CANDIDATES


def backbone(options, sizes, vocabulary, architecture, seed):
    """Blocks of attention and feed-forward network, without anything else.

    The feed-forward networks are as much narrower than `4 * dim` as the attention has
    more trainable weights than softmax attention, or wider.

    Args:
        options: `attention`, `positions` and `convolution` of the backbone.
        sizes: Dict of `layers`, `heads` and `dim`.
        vocabulary: Number of tokens.
        architecture: `"decoder"` or `"encoder"`.
        seed: Of the weights, and of what is drawn later.
    """

    def build(options, width):
        return EfficientTransformerBackbone(
            vocabulary_size=vocabulary,
            num_layers=sizes["layers"],
            num_heads=sizes["heads"],
            hidden_dim=sizes["dim"],
            intermediate_dim=width,
            architecture=architecture,
            **options,
        )

    width = 4 * sizes["dim"]
    wanted = trained_parameters(build(CANDIDATES["softmax"].options(False), width))
    excess = trained_parameters(build(options, width)) - wanted
    per_unit = sizes["layers"] * (2 * sizes["dim"] + 1)
    keras.utils.set_random_seed(seed)
    return build(options, width - round(excess / per_unit))


def fit(model, batches, sizes):
    """Trains by AdamW, with a warm-up and a cosine decay to zero.

    Args:
        model: A task.
        batches: Endless batches.
        sizes: Dict of `steps` and `learning_rate`.
    """
    steps = sizes["steps"]
    warmup = max(1, steps // 20)
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0,
        max(1, steps - warmup),
        warmup_target=sizes["learning_rate"],
        warmup_steps=warmup,
    )
    model.compile(
        keras.optimizers.AdamW(schedule, weight_decay=0.01, global_clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[],
    )
    model.fit(batches, shuffle=False, steps_per_epoch=steps, verbose=0)
