"""Sparse attention of whole sequences by a kernel of the backend."""

import dataclasses

from keras import ops

from keras_efficient_attn.ops.common.chunking import chunk_count, fit_length
from keras_efficient_attn.ops.common.compilation import jit_on_jax
from keras_efficient_attn.ops.common.inputs import hide_masked
from keras_efficient_attn.ops.common.interval_softmax.intervals import (
    AllKeys,
    NearKeys,
)
from keras_efficient_attn.ops.common.online_softmax import finish, merge
from keras_efficient_attn.ops.sparse_attention.fixed import gather_summaries
from keras_efficient_attn.ops.sparse_attention.strided import by_column, by_row


@jit_on_jax("config", "options", "kernel")
def attend_by_kernel(inputs, config, options, kernel):
    """The output, by a module of `interval_softmax`."""
    length, scale = inputs[0].shape[1], options.scale
    inputs, valid = _whole_blocks(*inputs, config.stride)
    near, far = config.split_heads(*inputs)
    near_keys = NearKeys(config.masks(options.causal)[0], inputs[1].shape[1])
    if config.merges and config.pattern == "strided":
        parts = [
            kernel.attend_part(*near, valid, near_keys, scale),
            _attend_columns(kernel.attend_part, far, valid, config, options),
        ]
        return finish(*merge(parts), True)[:, :length]
    outputs = []
    if config.merges:
        pattern = KeysAndSummaries(near_keys, config.stride, config.summary)
        *summaries, exist = _summaries(far, valid, config)
        keys = map(_join, inputs[1:], summaries)
        if valid is not None:
            valid = _join(_for_heads(valid, far[1]), exist)
        outputs.append(kernel.attend(inputs[0], *keys, valid, pattern, scale))
    elif config.near_heads:
        outputs.append(kernel.attend(*near, valid, near_keys, scale))
    if config.far_heads and config.pattern == "strided":
        outputs.append(_attend_columns(kernel.attend, far, valid, config, options))
    elif config.far_heads and not config.merges:
        summaries = _summaries(far, valid, config)
        pattern = AllKeys(summaries[0].shape[1])
        outputs.append(kernel.attend(far[0], *summaries, pattern, scale))
    return ops.concatenate(outputs, axis=2)[:, :length]


def _whole_blocks(query, key, value, key_mask, stride):
    """Inputs padded to whole blocks or rows, and the key mask as 0 or 1, if needed."""
    length = chunk_count(max(query.shape[1], key.shape[1]), stride) * stride
    if key_mask is None and key.shape[1] < length:
        key_mask = ops.ones(key.shape[:2])
    key, value = hide_masked(key, key_mask), hide_masked(value, key_mask)
    if key_mask is not None:
        key_mask = fit_length(ops.cast(key_mask, "int32"), length)
    return [fit_length(x, length) for x in (query, key, value)], key_mask


def _attend_columns(attend, inputs, valid, config, options):
    """The output, or the part, of every column, treated as a sequence."""
    batch, length = inputs[0].shape[:2]
    rows = length // config.stride

    def columns(x):
        x = by_column(x, rows, config.stride)
        return ops.reshape(x, (-1, *x.shape[2:]))

    valid = None if valid is None else columns(valid)
    pattern = ColumnRows(rows, options.causal, config.merges)
    outputs = attend(*map(columns, inputs), valid, pattern, options.scale)
    is_part = isinstance(outputs, tuple)
    outputs = [
        by_row(ops.reshape(x, (batch, config.stride, *x.shape[1:])))
        for x in (outputs if is_part else [outputs])
    ]
    return outputs if is_part else outputs[0]


def _summaries(inputs, valid, config):
    """Keys and values of each head's summaries, and their mask or `None`."""
    tensors = list(inputs[1:])
    if valid is not None:
        tensors.append(_for_heads(valid, inputs[1]))
    stride, summary = config.stride, config.summary
    summaries = [gather_summaries(x, stride, summary) for x in tensors]
    return summaries if valid is not None else [*summaries, None]


def _for_heads(valid, key):
    return ops.broadcast_to(valid[..., None], key.shape[:3])


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
