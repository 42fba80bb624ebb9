"""A language model of words whose output is its loss, and what is measured of it."""

import keras
import numpy as np
from keras import ops

from command_line import UsageError, check_heads
from image_classes.training import head_distances
from keras_efficient_attn.models import EfficientTransformerBackbone, FeedForwardOptions
from keras_efficient_attn.ops import chunked_cross_entropy
from words.data import loss_inputs, sliding_windows


class TiedLoss(keras.layers.Layer):
    """Cross-entropies of the next words, by the embedding's weights, in slices.

    The logits of all words exist for one slice of positions at a time.

    Args:
        embedding: The `keras.layers.ReversibleEmbedding` of the words, built.
        chunk_size: Positions of a slice.
    """

    def __init__(self, embedding, chunk_size, **kwargs):
        super().__init__(**kwargs)
        self.embedding = embedding
        self.chunk_size = chunk_size

    def call(self, hidden, labels):
        kernel = ops.transpose(ops.convert_to_tensor(self.embedding.embeddings))
        return chunked_cross_entropy(
            hidden, kernel, None, labels, chunk_size=self.chunk_size
        )

    def compute_output_spec(self, hidden, labels):
        return keras.KerasTensor(hidden.shape[:-1], dtype="float32")


def build_model(attention, vocabulary_size, arguments):
    """A compiled model of the losses of the next words, `(batch, length)`, in nats.

    Its blocks are those of FourierFormer's authors: post-norm, embeddings scaled, and
    dropout inside the feed-forward network and on the last output.

    Args:
        attention: As `--attention`.
        vocabulary_size: Number of words.
        arguments: With `layers`, `dim`, `heads`, `dropout`, `chunk`, `learning_rate`
            and `steps`.

    Raises:
        UsageError: If no such model exists.
    """
    check_heads(arguments.dim, arguments.heads)
    try:
        backbone = EfficientTransformerBackbone(
            vocabulary_size,
            arguments.layers,
            arguments.heads,
            arguments.dim,
            4 * arguments.dim,
            attention=attention,
            residual={"kind": "post_norm", "output_dropout": arguments.dropout},
            feed_forward=FeedForwardOptions("relu", dropout=arguments.dropout),
            positions="sinusoidal",
            embedding={"scale": True},
            dropout=arguments.dropout,
        )
    except (TypeError, ValueError) as error:
        raise UsageError(f"--attention {error}") from error
    tokens, labels = (
        keras.Input((None,), dtype="int32", name=name)
        for name in ("token_ids", "labels")
    )
    hidden = backbone({"token_ids": tokens, "padding_mask": ops.ones_like(tokens)})
    losses = TiedLoss(backbone.token_embedding, arguments.chunk)(hidden, labels)
    model = keras.Model({"token_ids": tokens, "labels": labels}, losses)
    model.backbone = backbone
    warmup = max(1, arguments.steps // 10)
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0,
        max(1, arguments.steps - warmup),
        warmup_target=arguments.learning_rate,
        warmup_steps=warmup,
    )
    optimizer = keras.optimizers.Adam(schedule, global_clipnorm=0.25)
    model.compile(optimizer, lambda _, losses: losses)
    return model


def perplexity(model, tokens, length, stride, batch):
    """`exp` of the mean loss of all words but the first, by sliding windows."""
    rows, weights = sliding_windows(tokens, length, stride)
    losses = model.predict(loss_inputs(rows), batch_size=batch, verbose=0)
    return float(np.exp((losses * weights).sum() / weights.sum()))


def mean_head_distances(model, rows):
    """Mean and variance of the distance between heads, `(2,)`; means of the layers."""
    x, distances = model.backbone.embedding(rows), []
    for block in model.backbone.transformer_layers:
        h = block.attention_residual.before(x)
        _, scores = block.attention(
            h, h, use_causal_mask=True, return_attention_scores=True
        )
        distances.append(head_distances(ops.convert_to_numpy(scores)))
        x = block(x)
    return np.mean(distances, axis=0)
