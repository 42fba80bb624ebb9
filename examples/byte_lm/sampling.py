"""Continues a text, byte by byte."""

import keras_hub
import numpy as np

from byte_lm.data import model_inputs
from keras_efficient_attn import benchmark


def sample(model, prompt, count, temperature, seed):
    """Samples bytes after a prompt, with KerasHub's `generate`.

    The model's layers carry a state, so that a byte has constant cost; a softmax
    layer's state is a cache of keys and values, which grows.

    Args:
        model: A language model of `build_model`; its sampler is replaced.
        prompt: The bytes to continue.
        count: Number of bytes to sample.
        temperature: Divides the logits; 0 takes the most likely byte.
        seed: Seed of the draws.

    Returns:
        `(sampled, bytes_per_second)`; the time to read the prompt counts, the time to
        compile does not.
    """
    if temperature:
        sampler = keras_hub.samplers.RandomSampler(seed=seed, temperature=temperature)
    else:
        sampler = keras_hub.samplers.GreedySampler()
    model.compile(sampler=sampler)
    tokens = np.zeros((1, len(prompt) + count), "uint8")
    tokens[0, : len(prompt)] = np.frombuffer(prompt, np.uint8)
    inputs = model_inputs(tokens)
    inputs["padding_mask"][:, len(prompt) :] = 0
    sampled = []

    def generate():
        sampled.append(model.generate(inputs, stop_token_ids=None)["token_ids"])

    timing = benchmark.time_functions({"generate": generate}, repeats=1)["generate"]
    continuation = np.asarray(sampled[-1])[0, len(prompt) :]
    return continuation.astype("uint8").tobytes(), count / timing.median
