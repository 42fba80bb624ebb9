"""The task's data, and a model's accuracy by distance."""

import keras
import numpy as np

from keras_efficient_attn.models import (
    EfficientCausalLM,
    EfficientTransformerBackbone,
    TransformerXL,
)

NOTHING = 0


class PlantedSymbols(keras.utils.PyDataset):
    """Documents with a single symbol, in segments; each row is a document.

    Args:
        documents: Groups of `batch` documents that start together.
        batch: Rows.
        length: Positions in a segment.
        segments: Segments in a document.
        symbols: Numbered from 1.
        seed: Seed of the documents.
    """

    def __init__(self, documents, batch, length, segments, symbols, seed):
        super().__init__()
        self.documents, self.batch, self.length = documents, batch, length
        self.segments, self.symbols, self.seed = segments, symbols, seed

    def __len__(self):
        return self.documents * self.segments

    def __getitem__(self, index):
        document, segment = divmod(index, self.segments)
        random = np.random.default_rng((self.seed, document))
        planted = random.integers(1, self.symbols + 1, (self.batch, 1))
        place = random.integers(0, self.length, (self.batch, 1))
        position = segment * self.length + np.arange(self.length)
        tokens = np.where(position == place, planted, NOTHING).astype("int32")
        targets = np.repeat(planted, self.length, axis=1).astype("int32")
        weights = (position >= place).astype("float32")
        reset = np.full(self.batch, segment == 0)
        return {"token_ids": tokens, "reset": reset}, targets, weights


def accuracies(layers, memory, arguments):
    """Trains a model and evaluates it with the same and with a longer memory.

    Returns:
        Dict from the memory length in evaluation to a list of accuracies, one per
        segment of new documents.
    """
    keras.utils.set_random_seed(arguments.seed)
    backbone = EfficientTransformerBackbone(
        vocabulary_size=arguments.symbols + 1,
        num_layers=layers,
        num_heads=arguments.heads,
        hidden_dim=arguments.dim,
        intermediate_dim=2 * arguments.dim,
        attention=f"xl:memory_length={memory}",
    )
    model = TransformerXL(EfficientCausalLM(backbone), arguments.batch)
    model.compile(
        keras.optimizers.Adam(arguments.learning_rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )

    def data(documents, seed):
        return PlantedSymbols(
            documents,
            arguments.batch,
            arguments.segment,
            arguments.segments,
            arguments.symbols,
            seed,
        )

    documents = max(1, arguments.steps // arguments.segments)
    model.fit(data(documents, arguments.seed), verbose=arguments.verbose)
    test = data(-(-arguments.test_documents // arguments.batch), arguments.seed + 1)
    results = {}
    for evaluated in dict.fromkeys((memory, arguments.longer * memory)):
        longer = TransformerXL(model.language_model, arguments.batch, evaluated)
        logits = longer.predict(test, verbose=0)
        results[evaluated] = by_segment(logits, test, arguments)
    return results


def by_segment(logits, test, arguments):
    """The accuracy of predictions in each segment of the documents."""
    # Segments in order, with the documents of a batch together.
    shape = (-1, arguments.segments, arguments.batch, arguments.segment)
    named = logits[..., 1:].argmax(-1).reshape(shape) + 1
    batches = [test[index] for index in range(len(test))]
    targets, weights = (
        np.concatenate([batch[i] for batch in batches]).reshape(shape) for i in (1, 2)
    )
    right = ((named == targets) * weights).sum((0, 2, 3))
    return [float(x) for x in right / weights.sum((0, 2, 3))]
