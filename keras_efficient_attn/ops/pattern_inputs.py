"""What local and sparse attention do with their inputs and states."""

import keras
from keras import ops

from keras_efficient_attn.ops.chunking import pad_length
from keras_efficient_attn.ops.partial_attention import accumulator_dtype

RECENT = ("key", "value", "mask")


def masked_inputs(query, key, value, key_mask):
    """Query, key, value, and which keys exist, in the accumulator's dtype."""
    dtype = accumulator_dtype(query, key, value)
    if key_mask is None:
        valid = ops.ones(ops.shape(key)[:2], dtype)
    else:
        kept = ops.cast(key_mask, "bool")[..., None, None]
        key, value = (ops.where(kept, t, ops.zeros_like(t)) for t in (key, value))
        valid = ops.cast(key_mask, dtype)
    query, key, value = (ops.cast(t, dtype) for t in (query, key, value))
    return query, key, value, valid


def fitted(query, key, value, valid):
    """All as long as the longest, with zeros, and keys that do not exist, behind."""
    lengths = ops.shape(query)[1], ops.shape(key)[1]
    if all(isinstance(length, int) for length in lengths):
        length = max(lengths)
    elif keras.backend.backend() == "jax":
        # JAX exports symbolic lengths, and compares only those that are the same.
        length = lengths[0]
    else:
        length = ops.maximum(*lengths)
    query = pad_length(query, 0, length - lengths[0])
    key, value, valid = (
        pad_length(t, 0, length - lengths[1]) for t in (key, value, valid)
    )
    return query, key, value, valid


def extended(state, key, value, valid):
    """The recent keys of a state, and those of a segment behind them."""
    return tuple(
        ops.concatenate([ops.cast(state[name], new.dtype), new], axis=1)
        for name, new in zip(RECENT, (key, value, valid), strict=True)
    )


def recent_keys(past, length, position):
    """The state after a segment, from `extended`."""
    state = {name: t[:, length:] for name, t in zip(RECENT, past, strict=True)}
    return {**state, "position": position + length}


def is_positive_int(x):
    return isinstance(x, int) and not isinstance(x, bool) and x > 0


def is_pair(x, least):
    """Whether `x` is two integers, neither below `least`."""
    return (
        isinstance(x, list | tuple)
        and len(x) == 2
        and all(isinstance(n, int) and n >= least for n in x)
    )


def check_pattern_call(
    query, key, value, key_mask, causal, state, implementation, dropout, seed
):
    """Raises `ValueError` for what does not go together."""
    shapes = {"q": tuple(query.shape), "k": tuple(key.shape), "v": tuple(value.shape)}
    if any(len(shape) != 4 for shape in shapes.values()):
        raise ValueError(
            "`query`, `key` and `value` must have the shape (batch, length, heads, "
            f"dim). Received: query.shape={shapes['q']}, key.shape={shapes['k']}, "
            f"value.shape={shapes['v']}"
        )
    if not _agree(shapes["q"][2:], shapes["k"][2:]):
        raise ValueError(
            "`query` and `key` must agree in heads and dim. Received: "
            f"query.shape={shapes['q']}, key.shape={shapes['k']}"
        )
    if not _agree(shapes["k"][:3], shapes["v"][:3]):
        raise ValueError(
            "`key` and `value` must agree in batch, length and heads. Received: "
            f"key.shape={shapes['k']}, value.shape={shapes['v']}"
        )
    if key_mask is not None and not _agree(tuple(key_mask.shape), shapes["k"][:2]):
        raise ValueError(
            f"`key_mask` must have the shape {shapes['k'][:2]} of `key`. Received: "
            f"key_mask.shape={tuple(key_mask.shape)}"
        )
    if implementation not in (None, "blocks", "reference"):
        raise ValueError(
            "`implementation` must be None, 'blocks' or 'reference'. Received: "
            f"implementation={implementation!r}"
        )
    if dropout and seed is None:
        raise ValueError(
            f"`dropout` needs a `dropout_seed`. Received: dropout={dropout}, "
            "dropout_seed=None"
        )
    if implementation == "reference" and (state is not None or dropout):
        raise ValueError(
            "`implementation='reference'` takes no `state` and no `dropout`. "
            f"Received: state={None if state is None else sorted(state)}, "
            f"dropout={dropout}"
        )
    if state is None:
        return
    if not causal:
        raise ValueError(
            "`state` holds the past, and needs `causal=True`. Received: causal=False"
        )
    if not _agree(shapes["q"][1:2], shapes["k"][1:2]):
        raise ValueError(
            "With `state`, queries and keys must have the same length. Received: "
            f"query.shape={shapes['q']}, key.shape={shapes['k']}"
        )


def _agree(first, second):
    """Whether two shapes are equal as far as they are known."""
    return len(first) == len(second) and all(
        a is None or b is None or a == b for a, b in zip(first, second, strict=True)
    )
