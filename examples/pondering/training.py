"""Trains an RNN with and without adaptive computation time."""

import keras
import numpy as np

from keras_efficient_attn import AdaptiveComputationTime, AdaptiveRNN

CELLS = {"simple": keras.layers.SimpleRNNCell, "lstm": keras.layers.LSTMCell}


def build_model(task, cost, settings, arguments):
    """`cost` is the ponder cost, or `None` for an RNN without pondering."""
    _, length, dim = task.x.shape
    outputs = task.y.shape[-1]
    inputs = keras.Input((length, dim))
    cell = CELLS[settings["cell"]](settings["units"])
    if cost is None:
        rnn, ponder = keras.layers.RNN(cell, return_sequences=True), None
        x = rnn(inputs)
    else:
        cell = AdaptiveComputationTime(
            cell,
            arguments.max_steps,
            ponder_cost=cost,
            halting_bias=arguments.halting_bias,
        )
        rnn = AdaptiveRNN(cell, return_sequences=True)
        x, ponder = rnn(inputs, return_ponder=True)
        ponder = ponder["steps"]
    x = keras.layers.Dense(outputs * task.classes)(x)
    logits = keras.layers.Reshape((length, outputs, task.classes))(x)
    model = keras.Model(inputs, logits)
    model.compile(
        keras.optimizers.Adam(settings["learning_rate"]),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    steps = None if ponder is None else keras.Model(inputs, ponder)
    return model, steps


def train_and_measure(make_task, cost, settings, arguments):
    """Trains one model and measures it on newly drawn sequences.

    Args:
        make_task: One of `tasks.TASKS`.
        cost: The ponder cost, or `None` for an RNN without pondering.
        settings: Dict of `size`, `cell`, `units`, `steps` and `learning_rate`.
        arguments: The parsed command line.

    Returns:
        Dict of `accuracy`, the share of correct sequences; `mean_steps`, 1 without
        pondering; `by_difficulty`, a dict from difficulty to `(accuracy, steps)` of
        positions.
    """
    keras.utils.set_random_seed(arguments.seed)
    size = settings["size"]
    train = make_task(settings["steps"] * arguments.batch, size, arguments.seed)
    model, steps_model = build_model(train, cost, settings, arguments)
    weight = np.repeat(train.weight[..., None], train.y.shape[-1], axis=-1)
    model.fit(
        train.x,
        train.y,
        sample_weight=weight,
        batch_size=arguments.batch,
        verbose=arguments.verbose,
    )
    test = make_task(arguments.test_sequences, size, arguments.seed + 1)
    logits = model.predict(test.x, batch_size=512, verbose=0)
    right = (logits.argmax(-1) == test.y).all(-1)
    asked = test.weight > 0
    steps = np.ones(asked.shape)
    if steps_model is not None:
        steps = steps_model.predict(test.x, batch_size=512, verbose=0)
    return {
        "accuracy": (right | ~asked).all(-1).mean(),
        "mean_steps": steps.mean(),
        "by_difficulty": {
            int(d): (
                right[asked & (test.difficulty == d)].mean(),
                steps[test.difficulty == d].mean(),
            )
            for d in np.unique(test.difficulty)
        },
    }
