"""The state of causal attention to near keys: the last keys within its reach."""

from keras import ops

from keras_efficient_attn.ops.common.chunking import pad_length

RECENT = ("key", "value", "mask")


def recent_keys_spec(batch_size, reach, num_heads, key_dim, value_dim, dtype):
    """Names, shapes and dtypes of a state of the last `reach` keys.

    `"key"` and `"value"` are `(batch, reach, heads, dim)`, `"mask"` is `(batch, reach)`
    and 1 for keys that exist, and `"position"` `(batch,)` is the number of positions
    read.
    """
    rows = (batch_size, reach)
    return {
        "key": ((*rows, num_heads, key_dim), dtype),
        "value": ((*rows, num_heads, value_dim), dtype),
        "mask": (rows, dtype),
        "position": ((batch_size,), "int32"),
    }


def append_segment(state, *segment, names=RECENT):
    """The keys, values and masks of a state, followed by a segment's."""
    return tuple(
        ops.concatenate([ops.cast(state[name], new.dtype), new], axis=1)
        for name, new in zip(names, segment, strict=True)
    )


def drop_oldest(past, length, position):
    """The state after a segment of that length, from `append_segment`."""
    state = {name: t[:, length:] for name, t in zip(RECENT, past, strict=True)}
    return {**state, "position": position + length}


def fit_recent(state, reach):
    """The keys, values and masks of a state, cut or padded to `reach` keys."""
    excess = state["mask"].shape[1] - reach
    fit = {}
    for name in RECENT:
        t = state[name]
        fit[name] = t[:, excess:] if excess > 0 else pad_length(t, -excess, 0)
    return fit
