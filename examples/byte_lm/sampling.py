"""Continues a text, byte by byte."""

import time

import keras
import numpy as np

from byte_lm.model import StreamingModel, compiled, is_streaming


def sample(model, prompt, count, length, temperature, seed):
    """Samples bytes after a prompt.

    A model whose layers stream reads the prompt once, and then costs the same for
    each byte, however many came before. A model with a softmax layer reads the last
    `length` bytes again for each byte.

    Args:
        model: A language model of `build_model`.
        prompt: The bytes to continue.
        count: Number of bytes to sample.
        length: Context of a model that does not stream.
        temperature: Divides the logits; 0 takes the likeliest byte.
        seed: Seed of the draws.

    Returns:
        `(sampled, bytes_per_second)`; the time to compile and to read the prompt is
        not counted.
    """
    generator = np.random.default_rng(seed)
    next_logits = (_streamed if is_streaming(model) else _recomputed)(model, length)
    sampled = bytearray()
    logits = next_logits(prompt)
    # The second shape compiles here, before the clock starts.
    for i in range(count):
        if i == 1:
            start = time.perf_counter()
        byte = _draw(logits, temperature, generator)
        sampled.append(byte)
        if i + 1 < count:
            logits = next_logits(bytes([byte]))
    seconds = time.perf_counter() - start if count > 1 else float("nan")
    return bytes(sampled), (count - 1) / seconds


def _streamed(model, length):
    stream = StreamingModel(model)
    states = stream.initial_states(1)
    step = compiled(stream)

    def next_logits(new):
        nonlocal states
        tokens = np.frombuffer(new, np.uint8)[None].astype("int32")
        logits, states = step({"tokens": tokens, "states": states})
        return keras.ops.convert_to_numpy(logits)[0, -1]

    return next_logits


def _recomputed(model, length):
    step = compiled(model)
    context = bytearray()

    def next_logits(new):
        context.extend(new)
        recent = bytes(context[-length:])
        # Zeros after the last byte keep one shape, and a causal model ignores them.
        tokens = np.zeros((1, length), "int32")
        tokens[0, : len(recent)] = np.frombuffer(recent, np.uint8)
        return keras.ops.convert_to_numpy(step(tokens))[0, len(recent) - 1]

    return next_logits


def _draw(logits, temperature, generator):
    if temperature == 0:
        return int(np.argmax(logits))
    logits = logits.astype("float64") / temperature
    weights = np.exp(logits - logits.max())
    return int(generator.choice(len(weights), p=weights / weights.sum()))
