"""Prepares inputs of softmax attention over a pattern: masks, casts and pads."""

import dataclasses

import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.backend import BACKEND, shape_of
from keras_efficient_attn.ops.common.checks import (
    check_dropout,
    check_float_dtype,
    check_heads,
    check_implementation,
    check_number,
    check_streaming,
)
from keras_efficient_attn.ops.common.chunking import pad_length
from keras_efficient_attn.ops.common.interval_softmax.choice import choose_kernel
from keras_efficient_attn.ops.common.numerics import accumulator_dtype
from keras_efficient_attn.ops.common.rows import WHOLE_ROWS, Rows


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

    def dropout_and_seed(self, seed):
        """`(rate, seed)`, or `None` without dropout."""
        return (self.dropout, seed) if self.dropout else None


@dataclasses.dataclass(frozen=True, eq=False)
class SoftmaxCall:
    """The common arguments of all pattern attention operations.

    Layers, which check their own arguments, make it directly; operations by `checked`.

    Attributes:
        inputs: `(query, key, value, key_mask)`, tensors; the last may be `None`.
        options: `SoftmaxOptions`.
        state: State or `None`.
        seed: Seed of the dropout, or `None`.
        implementation: Name or `None`.
        rows: `Rows`.
    """

    inputs: tuple
    options: SoftmaxOptions
    state: dict | None = None
    seed: object = None
    implementation: str | None = None
    rows: Rows = WHOLE_ROWS

    @classmethod
    def checked(cls, inputs, causal, scale, state, dropout, implementation, kernels=()):
        """Makes the call from the arguments of an operation.

        Args:
            inputs: `(query, key, value, key_mask)`.
            causal: Whether query `t` sees keys `0..t` only.
            scale: Factor of the dot products, or `None` for `1 / √dim`.
            state: State or `None`.
            dropout: `(rate, seed)` of dropout on the normalised weights, or `None`.
            implementation: Name or `None`.
            kernels: Names of the kernels that may compute the operation.

        Raises:
            ValueError: For inconsistent arguments.
            TypeError: If the values are not of a floating-point dtype.
        """
        query, key, value, key_mask = inputs
        inputs = query, key, value, boolean_mask(key_mask)
        check_heads(*inputs)
        check_float_dtype("value", value)
        check_number("scale", scale, optional=True)
        check_dropout(dropout)
        refused = dict(state=state, dropout=dropout)
        check_implementation(implementation, "blocks", *kernels, **refused)
        check_streaming(query, key, causal, state)
        inputs = tuple(x if x is None else ops.convert_to_tensor(x) for x in inputs)
        if scale is None:
            scale = inputs[0].shape[-1] ** -0.5
        rate, seed = (0.0, None) if dropout is None else dropout
        options = SoftmaxOptions(bool(causal), float(scale), float(rate))
        return cls(inputs, options, state, seed, implementation)

    def attend(self, config, forms, *operands):
        """The output in the dtype of the values; with a state, `(output, state)`.

        Args:
            config: The pattern, hashable.
            forms: `(blocks, single, reference)`: for sequences and segments, for one
                position with a state, and the definition; with `kernels`, also the
                form that a kernel computes. The first two are called with `(inputs,
                *operands, state, seed, rows, config, options)` and return `(output,
                new state or None)`. The others are called with `(inputs, *operands,
                config, options)` and return the output; a kernel's form without
                operands, and with the kernel's module at the end.
            *operands: Tensors that only this operation has.
        """
        blocks, single, reference, *by_kernel = forms
        inputs, state, options = self.inputs, self.state, self.options
        kernel = choose_kernel(self, config) if by_kernel else None
        if kernel is not None:
            output = by_kernel[0](inputs, config, options, kernel)
            new_state = None
        elif self.implementation == "reference":
            output, new_state = reference(inputs, *operands, config, options), None
        else:
            form = blocks if state is None or inputs[0].shape[1] != 1 else single
            output, new_state = form(
                inputs,
                *operands,
                state,
                self.seed,
                self.rows,
                config=config,
                options=options,
            )
        output = ops.cast(output, inputs[2].dtype)
        return output if state is None else (output, new_state)


def boolean_mask(mask, name="key_mask"):
    """A mask as a boolean tensor, true where it is not 0; `None` for `None`.

    Raises:
        TypeError: If it is no tensor, array or list of booleans or numbers.
    """
    if mask is None:
        return None
    if not hasattr(mask, "dtype"):
        mask = as_mask_tensor(name, mask)
    return ops.cast(mask, "bool")


def as_mask_tensor(name, mask):
    """A mask that is a list, as a tensor.

    Raises:
        TypeError: If it is no list of booleans or numbers, of equal lengths.
    """
    try:
        array = np.array(mask)
    except ValueError:
        array = np.array(None)
    if array.dtype.kind not in "buif":
        raise TypeError(
            f"`{name}` must be a tensor, an array or a list of rows of booleans or "
            f"numbers, of one length. Received: {name}={mask!r}"
        )
    return ops.convert_to_tensor(array)


def hide_masked(keys, key_mask):
    """Keys or values, with masked entries replaced by zeros."""
    if key_mask is None:
        return keys
    kept = ops.cast(key_mask, "bool")[..., None, None]
    return ops.where(kept, keys, ops.zeros_like(keys))


def masked_inputs(query, key, value, key_mask):
    """Query, key, value and key mask, in the accumulator's dtype."""
    dtype = accumulator_dtype(query, key, value)
    if key_mask is None:
        valid = ops.ones(shape_of(key)[:2], dtype)
    else:
        key, value = hide_masked(key, key_mask), hide_masked(value, key_mask)
        valid = ops.cast(key_mask, dtype)
    query, key, value = (ops.cast(t, dtype) for t in (query, key, value))
    return query, key, value, valid


def pad_to_common_length(query, key, value, valid):
    """Pads all to the longest length with zeros and masked keys."""
    lengths = shape_of(query)[1], shape_of(key)[1]
    if isinstance(lengths[0], int) and lengths[0] == lengths[1]:
        return query, key, value, valid
    if all(isinstance(length, int) for length in lengths):
        length = max(lengths)
    elif BACKEND == "jax":
        # In exports, JAX compares symbolic lengths only if they are identical.
        length = lengths[0] if lengths[0] == lengths[1] else sum(lengths)
    else:
        length = ops.maximum(*lengths)
    query = pad_length(query, 0, length - lengths[0])
    key, value, valid = (
        pad_length(t, 0, length - lengths[1]) for t in (key, value, valid)
    )
    return query, key, value, valid
