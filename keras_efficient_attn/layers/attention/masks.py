"""Masks of attention calls, as one mask of queries and one of keys."""

import keras
from keras import ops

from keras_efficient_attn.ops.common.backend import is_traced, shape_of
from keras_efficient_attn.ops.common.checks import may_agree

MASK_NAMES = ("query_mask", "value_mask", "key_mask", "attention_mask")


def check_attention_mask(layer_name, shape, key_shape):
    """Raises `ValueError` unless a dense mask is the same for all queries.

    Args:
        layer_name: Name of the layer's class, for the error.
        shape: Shape of the mask: `(T, S)`, `(batch, T, S)` or `(batch, heads, T, S)`.
        key_shape: Shape of the keys' inputs, `(batch, S, dim)`.
    """
    # (T, S), (B, T, S) or (B, H, T, S): all but the batch and S must be 1.
    if len(shape) in (2, 3, 4) and set(shape[-2:-1] + shape[1:-2]) == {1}:
        received = (*(shape[:1] if len(shape) > 2 else (1,)), shape[-1])
        shared = (1, key_shape[1])
        if any(may_agree(received, keys) for keys in (key_shape[:2], shared)):
            return
        raise ValueError(
            "`attention_mask` must have the keys' batch size, or 1, and their "
            f"length. Received: attention_mask.shape={shape}, "
            f"key.shape={tuple(key_shape)}"
        )
    raise ValueError(
        f"{layer_name} never forms the matrix of queries by keys, "
        "and so cannot apply an `attention_mask` that differs between "
        "queries. Pass a mask over keys as `key_mask` (batch, key_length), "
        "or as `attention_mask` of shape (batch, 1, key_length); a mask over "
        "queries as `query_mask` (batch, query_length); and "
        "`use_causal_mask=True` for causality. Received: "
        f"attention_mask.shape={shape}"
    )


def check_document_ids(layer, ids, inputs, causal):
    """Raises `ValueError` or `TypeError` for `document_ids` that a call cannot have.

    Args:
        layer: The attention layer.
        ids: `document_ids`.
        inputs: `(query, value, key)`.
        causal: Whether the call is causal.
    """
    name, (query, value, key) = type(layer).__name__, inputs
    if not layer.takes_documents:
        raise ValueError(
            f"{name} cannot keep the documents of a row apart: pass one document in "
            "each row. Received: `document_ids`"
        )
    if not keras.backend.is_int_dtype(ids.dtype):
        raise TypeError(
            "`document_ids` must be integers. Received: document_ids.dtype="
            f"{keras.backend.standardize_dtype(ids.dtype)}"
        )
    if len(query.shape) != 3 or not all(
        may_agree(ids.shape, x.shape[:2]) for x in (query, key)
    ):
        raise ValueError(
            "`document_ids` must have the shape (batch, length) of inputs (batch, "
            f"length, dim). Received: document_ids.shape={tuple(ids.shape)}, "
            f"query.shape={tuple(query.shape)}, key.shape={tuple(key.shape)}"
        )
    if not (causal or query is value or query is key):
        raise ValueError(
            "`document_ids` need self-attention: pass use_causal_mask=True, or the "
            "same tensor as `query` and as `value` or `key`. Received: "
            "use_causal_mask=False and other tensors"
        )


def boolean_masks(inputs, masks):
    """Masks as booleans, and the inputs.

    Where a compiled program cannot raise, inputs are NaN instead.

    Args:
        inputs: `(query, value, key)`, each `(batch, length, dim)`.
        masks: `(query_mask, value_mask, key_mask, attention_mask)`; some are `None`.

    Raises:
        ValueError: For a mask of floats other than 0 and 1, such as one to add to the
            logits.
    """
    booleans = []
    for name, mask in zip(MASK_NAMES, masks, strict=True):
        if mask is not None and keras.backend.is_float_dtype(mask.dtype):
            known = ops.all(ops.logical_or(mask == 0, mask == 1))
            if is_traced(known):
                # Identical tensors stay identical.
                poisoned = {
                    id(x): ops.where(known, x, ops.cast(float("nan"), x.dtype))
                    for x in inputs
                }
                inputs = tuple(poisoned[id(x)] for x in inputs)
            elif not known:
                raise ValueError(
                    f"`{name}` must be boolean: true, or 1, for positions to attend. A "
                    f"mask that is added to the logits is not supported; pass `{name} "
                    "== 0` instead. Received: floats other than 0 and 1"
                )
        booleans.append(None if mask is None else ops.cast(mask, "bool"))
    return inputs, tuple(booleans)


def merged_key_mask(masks, key):
    """The key masks combined, boolean `(batch, key_length)`, or `None`."""
    _, value_mask, key_mask, attention_mask = masks
    if attention_mask is not None:
        attention_mask = _key_mask_of(attention_mask, key)
    merged = None
    for mask in (key_mask, value_mask, attention_mask):
        if mask is not None:
            merged = mask if merged is None else ops.logical_and(merged, mask)
    return merged


def check_dense(**inputs):
    """Raises `TypeError` for a ragged tensor of TensorFlow."""
    import tensorflow as tf

    for name, x in inputs.items():
        if isinstance(x, tf.RaggedTensor) or getattr(x, "ragged", False):
            raise TypeError(
                f"`{name}` must be a dense tensor: pad it, such as by `to_tensor()`, "
                "and pass the positions that exist as `query_mask` and `key_mask`. "
                f"Received: a ragged tensor of shape {x.shape}"
            )


def zero_masked(x, mask):
    """`x` with zeros where the `(batch, length)` mask is `False`."""
    if mask is None:
        return x
    return ops.where(mask[..., None], x, ops.zeros_like(x))


def _key_mask_of(attention_mask, key):
    """The `(batch, key_length)` mask that a dense mask repeats for every query."""
    batch, length = shape_of(key)[:2]
    rows = 1 if len(attention_mask.shape) == 2 else shape_of(attention_mask)[0]
    mask = ops.reshape(attention_mask, (rows, length))
    return ops.broadcast_to(mask, (batch, length))
