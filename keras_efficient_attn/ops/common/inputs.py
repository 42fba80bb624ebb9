"""Inputs of softmax attention over a pattern: masked, cast, of one length."""

import dataclasses

from keras import ops

from keras_efficient_attn.ops.common.backend import backend_name
from keras_efficient_attn.ops.common.checks import (
    check_dropout,
    check_heads,
    check_implementation,
    check_streaming,
)
from keras_efficient_attn.ops.common.chunking import pad_length
from keras_efficient_attn.ops.common.numerics import accumulator_dtype


@dataclasses.dataclass(frozen=True)
class SoftmaxOptions:
    """Options that all patterns share; hashable, for compilers.

    Attributes:
        causal: Whether query `t` sees keys `0..t` only.
        scale: Factor of the dot products.
        dropout: Rate of dropout on the normalised weights.
    """

    causal: bool
    scale: float
    dropout: float

    def dropped(self, seed):
        """`(rate, seed)`, or `None` without dropout."""
        return (self.dropout, seed) if self.dropout else None


def check_call(inputs, options, state, seed, implementation):
    """Raises `ValueError` for arguments of a public operation that do not agree.

    Args:
        inputs: `(query, key, value, key_mask)`.
        options: `SoftmaxOptions`.
        state: State or `None`.
        seed: Seed of the dropout, or `None`.
        implementation: Name or `None`.
    """
    query, key, _, _ = inputs
    check_heads(*inputs)
    check_implementation(implementation, state, options.dropout)
    check_dropout(options.dropout, seed)
    check_streaming(query, key, options.causal, state)


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


def pad_to_common_length(query, key, value, valid):
    """All as long as the longest, with zeros, and keys that do not exist, behind."""
    lengths = ops.shape(query)[1], ops.shape(key)[1]
    if all(isinstance(length, int) for length in lengths):
        length = max(lengths)
    elif backend_name() == "jax":
        # JAX exports symbolic lengths, and compares only those that are the same.
        length = lengths[0]
    else:
        length = ops.maximum(*lengths)
    query = pad_length(query, 0, length - lengths[0])
    key, value, valid = (
        pad_length(t, 0, length - lengths[1]) for t in (key, value, valid)
    )
    return query, key, value, valid
