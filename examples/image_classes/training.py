"""Trains a classifier and measures it."""

import time

import keras
import numpy as np

from image_classes.model import attention_maps, build_model

# Number of held-out images whose attention is analysed.
LOOKED_AT = 64


def train_and_measure(attention, images, arguments):
    """Trains one model for each seed.

    Returns:
        Dict of the attention's name, `accuracies` on the held-out images, `distances`
        (`(seeds, layers, 2)`, `head_distances` of each) and `seconds` of training, one
        per seed; the number of `parameters`, and the last model's `maps` of the first
        held-out image, `(heads, tokens, tokens)` per layer.
    """
    accuracies, distances, seconds = [], [], []
    for seed in arguments.seeds:
        keras.utils.set_random_seed(seed)
        train_images, labels = images.train
        model = build_model(
            attention, train_images.shape[1:], images.classes, arguments
        )
        start = time.perf_counter()
        model.fit(
            train_images,
            labels,
            batch_size=arguments.batch,
            epochs=arguments.epochs,
            verbose=arguments.verbose,
        )
        seconds.append(time.perf_counter() - start)
        test = model.evaluate(*images.test, verbose=0, return_dict=True)
        accuracies.append(test["accuracy"])
        maps = attention_maps(model, images.test[0][:LOOKED_AT])
        distances.append([head_distances(each) for each in maps])
    return {
        "attention": attention,
        "accuracies": np.array(accuracies),
        "distances": np.array(distances),
        "parameters": model.count_params(),
        "seconds": seconds,
        "maps": [each[0] for each in maps],
    }


def head_distances(maps):
    """Mean and variance of the distance between heads, over images and pairs of heads.

    Args:
        maps: `(count, heads, tokens, tokens)`; the distance between matrices is
            Euclidean.

    Returns:
        `(mean, variance)`.
    """
    first, second = np.triu_indices(maps.shape[1], 1)
    difference = maps[:, first] - maps[:, second]
    distances = np.sqrt((difference**2).sum((-1, -2)))
    return float(distances.mean()), float(distances.var())
