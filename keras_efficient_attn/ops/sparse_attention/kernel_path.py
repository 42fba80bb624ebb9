"""Sparse attention of whole sequences by a kernel of the backend."""

import dataclasses

from keras import ops

from keras_efficient_attn.ops.common.chunking import chunk_count, fit_length
from keras_efficient_attn.ops.common.inputs import hide_masked
from keras_efficient_attn.ops.common.interval_softmax.intervals import (
    AllKeys,
    NearKeys,
    interleave,
    sequences,
)
from keras_efficient_attn.ops.common.plan import jit_on_jax
from keras_efficient_attn.ops.sparse_attention.blocks import gather_all_summaries


@jit_on_jax("config", "options", "kernel")
def attend_by_kernel(inputs, config, options, kernel):
    """The output, by a module of `interval_softmax`."""
    length = inputs[0].shape[1]
    inputs, valid = _whole_blocks(*inputs, config.stride)
    near_keys = NearKeys(config.masks(options.causal)[0], inputs[1].shape[1])
    form = _attend_strided if config.pattern == "strided" else _attend_fixed
    return form(inputs, valid, near_keys, config, options, kernel)[:, :length]


def _attend_strided(inputs, valid, near_keys, config, options, kernel):
    rows = inputs[0].shape[1] // config.stride
    column_keys = ColumnRows(rows, options.causal, config.merges)
    parts = (1, near_keys), (config.stride, column_keys)
    if config.merges:
        return kernel.attend_interleaved(*inputs, valid, parts, options.scale)
    outputs = []
    for heads, (step, keys) in zip(config.split_heads(*inputs), parts, strict=True):
        if heads[0].shape[2]:
            tensors = sequences(step, *heads, valid)
            output = kernel.attend(*tensors, keys, options.scale)
            outputs += interleave(step, output)
    return ops.concatenate(outputs, axis=2)


def _attend_fixed(inputs, valid, near_keys, config, options, kernel):
    near, far = config.split_heads(*inputs)
    if config.merges:
        pattern = KeysAndSummaries(near_keys, config.stride, config.summary)
        *summaries, exist = gather_all_summaries((*far[1:], valid), config)
        keys = map(_join, inputs[1:], summaries)
        if valid is not None:
            valid = ops.broadcast_to(valid[..., None], far[1].shape[:3])
            valid = _join(valid, exist)
        return kernel.attend(inputs[0], *keys, valid, pattern, options.scale)
    outputs = []
    if config.near_heads:
        outputs.append(kernel.attend(*near, valid, near_keys, options.scale))
    if config.far_heads:
        summaries = gather_all_summaries((*far[1:], valid), config)
        pattern = AllKeys(summaries[0].shape[1])
        outputs.append(kernel.attend(far[0], *summaries, pattern, options.scale))
    return ops.concatenate(outputs, axis=2)


def _whole_blocks(query, key, value, key_mask, stride):
    """Inputs padded to whole blocks or rows, and the key mask as 0 or 1, if needed."""
    length = chunk_count(max(query.shape[1], key.shape[1]), stride) * stride
    if key_mask is None and key.shape[1] < length:
        key_mask = ops.ones(key.shape[:2])
    key, value = hide_masked(key, key_mask), hide_masked(value, key_mask)
    if key_mask is not None:
        key_mask = fit_length(ops.cast(key_mask, "int32"), length)
    return [fit_length(x, length) for x in (query, key, value)], key_mask


def _join(keys, summaries):
    return ops.concatenate([keys, summaries], axis=1)


@dataclasses.dataclass(frozen=True)
class ColumnRows:
    """The rows of one column: earlier ones and, if not causal, also later ones.

    Attributes:
        keys: Number of rows.
        causal: Whether a query sees earlier rows only.
        remainder: Whether to exclude the query's row and the rows next to it.
    """

    keys: int
    causal: bool
    remainder: bool

    def intervals(self, i):
        if not self.remainder:
            return ((0, i if self.causal else self.keys - 1),)
        earlier = 0, i - 2
        return (earlier,) if self.causal else (earlier, (i + 2, self.keys - 1))


@dataclasses.dataclass(frozen=True)
class KeysAndSummaries:
    """The query block's keys, and, after all keys, the other blocks' summaries."""

    near: NearKeys
    stride: int
    summary: int

    @property
    def keys(self):
        return self.near.keys + self.near.keys // self.stride * self.summary

    def intervals(self, i):
        first, block = self.near.keys, i // self.stride
        earlier = first, first + block * self.summary - 1
        later = first + (block + 1) * self.summary, self.keys - 1
        causal = self.near.mask_fn.causal
        return (*self.near.intervals(i), earlier, *(() if causal else (later,)))
