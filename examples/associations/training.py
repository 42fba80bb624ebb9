"""One run: a model trained on a task, and its accuracy."""

import time

import keras
import numpy as np

from associations import TRACKING
from associations.data import Batches, model_inputs, sequences
from command_line import UsageError
from keras_efficient_attn.models import EfficientCausalLM, EfficientTransformerBackbone

# Test lengths of parity and permutations, as multiples of the training length.
LONGER = (1, 2, 4, 8)
# Seeds of the test and validation sequences; training uses the run's seed.
TEST_SEED, VALIDATION_SEED = 10**6, 10**6 + 1


def build_model(attention, dim, arguments):
    """A causal language model of blocks with this attention, or `UsageError`."""
    try:
        return EfficientCausalLM(
            EfficientTransformerBackbone(
                vocabulary_size=arguments.vocabulary,
                num_layers=arguments.layers,
                num_heads=arguments.heads,
                hidden_dim=dim,
                intermediate_dim=2 * dim,
                attention=attention,
                convolution=arguments.convolution or None,
                embedding="untied",
            )
        )
    except ValueError as error:
        raise UsageError(f"--attention {error}") from error


def state_bytes(model, length):
    """Bytes of the attention layers' states for one row and a context length."""
    total = 0
    for block in model.backbone.transformer_layers:
        layer = block.attention
        state = layer.get_initial_state(1, length if layer.state_grows else None)
        total += sum(keras.ops.convert_to_numpy(x).nbytes for x in state.values())
    return total


def accuracies(model, arguments, seed, rows):
    """Accuracy on new sequences.

    Returns:
        Dict from the number of pairs; for parity and permutations from the length,
        where only the second half of the positions counts.
    """
    results = {}
    if arguments.task in TRACKING:
        random = np.random.default_rng(seed)
        tokens, targets, _ = sequences(arguments, random, rows, None, max(LONGER))
        right = predict(model, tokens, arguments.batch) == targets
        for times in LONGER:
            length = times * arguments.length
            results[length] = float(right[:, length // 2 : length].mean())
        return results
    for pairs in arguments.pairs:
        random = np.random.default_rng((seed, pairs))
        tokens, targets, weights = sequences(arguments, random, rows, pairs)
        right = predict(model, tokens, arguments.batch) == targets
        results[pairs] = float(right[weights > 0].mean())
    return results


def predict(model, tokens, batch):
    """The most likely token at each position."""
    logits = model.predict(model_inputs(tokens), batch_size=batch, verbose=0)
    return logits.argmax(-1)


class Stop(keras.callbacks.Callback):
    """Ends training once the lowest validation accuracy is high enough.

    Args:
        arguments: The command line's.
    """

    def __init__(self, arguments):
        super().__init__()
        self.arguments, self.steps = arguments, 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        arguments = self.arguments
        if self.steps % arguments.validate_every:
            return
        found = accuracies(self.model, arguments, VALIDATION_SEED, arguments.batch)
        if arguments.verbose:
            shown = ", ".join(f"{name}: {value:.3f}" for name, value in found.items())
            print(f"step {self.steps}, {shown}", flush=True)
        if min(found.values()) > arguments.stop_at:
            self.model.stop_training = True


def run(attention, dim, learning_rate, seed, arguments):
    """Trains a model and tests it.

    Returns:
        Dict of `accuracy` and `validation` (as `accuracies` returns, on other
        sequences), `state_bytes` at the longest length of the test, `parameters`,
        `steps` and `seconds`.
    """
    keras.utils.set_random_seed(seed)
    model = build_model(attention, dim, arguments)
    warmup = max(1, arguments.steps // 20)
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0,
        max(1, arguments.steps - warmup),
        warmup_target=learning_rate,
        warmup_steps=warmup,
    )
    model.compile(
        keras.optimizers.Adam(schedule, global_clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[],
    )
    stop = Stop(arguments)
    start = time.perf_counter()
    model.fit(
        Batches(arguments, seed), verbose=0, shuffle=False, callbacks=[stop], epochs=1
    )
    longest = arguments.length * (max(LONGER) if arguments.task in TRACKING else 1)
    rows = arguments.test_sequences
    return {
        "accuracy": accuracies(model, arguments, TEST_SEED, rows),
        "validation": accuracies(model, arguments, VALIDATION_SEED, rows),
        "state_bytes": state_bytes(model, longest),
        "parameters": model.count_params(),
        "steps_taken": stop.steps,
        "seconds": round(time.perf_counter() - start, 1),
    }
