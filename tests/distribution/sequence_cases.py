"""Operations over a sequence, for one device and for several."""

import numpy as np
from keras import ops as K

BATCH, HEADS, DIM = 2, 2, 4


def make_inputs(length, seed=0):
    """Arrays by name; the mask hides the first keys of a row and some others."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype("float32")

    rows = BATCH, length, HEADS
    mask = rng.random((BATCH, length)) < 0.8
    mask[0, : length // 3] = False
    return {
        "query": normal(*rows, DIM),
        "key": normal(*rows, DIM),
        "value": normal(*rows, DIM),
        "key_mask": mask,
        "log_decay": -0.3 * rng.random(rows).astype("float32"),
        "decay_by_feature": -0.3 * rng.random((*rows, DIM)).astype("float32"),
        "beta": rng.random(rows).astype("float32"),
        "key_log_weight": 5 * normal(*rows),
        "codebook": normal(HEADS, 8, DIM),
        "sigma": np.ones(HEADS, "float32"),
    }


# Shapes of `key_log_weight` that do not fit `make_inputs(8)`.
WRONG_WEIGHTS = (2, 8), (2, 8, 1), (1, 8, 2), (2, 7, 2), (2, 8, 2, 1)


def positive(x):
    return K.elu(x) + 1


def unit(x):
    return x * K.rsqrt(K.sum(x * x, axis=-1, keepdims=True))


def linear(ops, x, *names, feature_map=positive, **options):
    options |= {name: x[name] for name in ("key_mask", *names)}
    if "decay_by_feature" in options:
        options["log_decay"] = options.pop("decay_by_feature")
    query, key = feature_map(x["query"]), feature_map(x["key"])
    return ops.linear_attention(query, key, x["value"], **options)


def local(ops, x, **options):
    tensors = x["query"], x["key"], x["value"]
    return ops.local_attention(*tensors, key_mask=x["key_mask"], **options)


def codes(ops, x, one_device, *names, **options):
    options |= {name: x[name] for name in ("key_mask", *names)}
    if one_device:
        options["causal"] = True
    tensors = x["query"], x["key"], x["value"], x["codebook"]
    return ops.vq_attention(*tensors, **options)


# `(ops, inputs, one_device) -> output`.
CASES = {
    "causal": lambda ops, x, one: linear(ops, x, causal=True),
    "not causal": lambda ops, x, one: linear(ops, x),
    "weighted": lambda ops, x, one: linear(ops, x, "key_log_weight", causal=True),
    "weighted, not causal": lambda ops, x, one: linear(ops, x, "key_log_weight"),
    "decay": lambda ops, x, one: linear(ops, x, "log_decay", causal=True),
    "decay by feature": lambda ops, x, one: linear(
        ops, x, "decay_by_feature", causal=True
    ),
    "gated delta": lambda ops, x, one: linear(
        ops,
        x,
        "log_decay",
        "beta",
        causal=True,
        normalize=False,
        feature_map=unit,
    ),
    "window": lambda ops, x, one: local(ops, x, window=5, causal=True),
    "window, not causal": lambda ops, x, one: local(ops, x, window=5),
    "codes": lambda ops, x, one: codes(ops, x, one),
    "codes and window": lambda ops, x, one: codes(ops, x, one, window=5),
    "expanded codes": lambda ops, x, one: codes(ops, x, one, window=5, order=2),
    "soft codes": lambda ops, x, one: codes(ops, x, one, "sigma", window=5),
}
