"""The task's data and model."""

import keras
import numpy as np

from keras_efficient_attn import ReformerLSHAttention

FULL = "full"


class Sequences(keras.utils.PyDataset):
    """Batches of `0 w 0 w`: inputs, the next symbols, and weights of the second half.

    Args:
        steps: Batches.
        batch: Rows of a batch.
        length: Length of a sequence, even.
        symbols: Number of symbols besides 0.
        seed: Batch `i` depends on `seed` and `i` only.
    """

    def __init__(self, steps, batch, length, symbols, seed):
        super().__init__()
        self.steps, self.seed = steps, seed
        self.shape, self.symbols = (batch, length // 2 - 1), symbols

    def __len__(self):
        return self.steps

    def __getitem__(self, i):
        random = np.random.default_rng((self.seed, i))
        words = random.integers(1, self.symbols + 1, self.shape)
        half = np.concatenate([np.zeros((len(words), 1), int), words], axis=1)
        whole = np.concatenate([half, half], axis=1).astype("int32")
        weights = np.zeros(whole[:, 1:].shape, "float32")
        # From the second 0 on, the next symbol can be predicted.
        weights[:, half.shape[1] :] = 1
        return whole[:, :-1], whole[:, 1:], weights


def build_model(setting, aligned, seed, arguments):
    """One block, causal; `setting` is `"full"` or the number of hash rounds."""
    length, dim = arguments.length - 1, arguments.dim
    tokens = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(arguments.symbols + 1, dim)(tokens)
    positions = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
    x = x + keras.layers.Embedding(length, dim)(positions)
    attention = ReformerLSHAttention(
        arguments.heads,
        dim // arguments.heads,
        bucket_size=arguments.bucket_size,
        num_buckets=arguments.buckets,
        num_hashes=1 if setting == FULL else setting,
        # Equal in all models, because they exchange weights.
        max_hashes=max(
            s for s in (8, *arguments.train, *arguments.evaluate) if s != FULL
        ),
        dense_length=length if setting == FULL else None,
        aligned=aligned,
        seed=seed,
    )
    h = keras.layers.LayerNormalization()(x)
    x = x + attention(h, h, use_causal_mask=True)
    h = keras.layers.LayerNormalization()(x)
    h = keras.layers.Dense(dim, "relu")(h)
    x = x + keras.layers.Dense(dim)(h)
    x = keras.layers.LayerNormalization()(x)
    logits = keras.layers.Dense(arguments.symbols + 1)(x)
    model = keras.Model(tokens, logits)
    model.compile(
        keras.optimizers.Adam(arguments.learning_rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )
    return model


def accuracies(trained, aligned, seed, arguments):
    """Trains a model, and evaluates its weights.

    Args:
        trained: `"full"`, or the number of hash rounds.
        aligned: Whether each bucket starts a chunk.
        seed: Seed of weights, rotations and data.
        arguments: The parsed arguments.

    Returns:
        Dict from settings of `arguments.evaluate` to the accuracy on the second half.
    """
    keras.utils.set_random_seed(seed)

    def sequences(steps, seed):
        sizes = arguments.batch, arguments.length, arguments.symbols
        return Sequences(steps, *sizes, seed)

    model = build_model(trained, aligned, seed, arguments)
    model.fit(
        sequences(arguments.steps, seed),
        verbose=arguments.verbose,
        shuffle=False,
    )
    results = {}
    # No seed of training data.
    test = sequences(-(-arguments.test_sequences // arguments.batch), 2**32 + seed)
    for evaluated in arguments.evaluate:
        other = build_model(evaluated, aligned, seed, arguments)
        other.set_weights(model.get_weights())
        metrics = other.evaluate(test, verbose=0, return_dict=True)
        results[evaluated] = metrics["accuracy"]
    return results
