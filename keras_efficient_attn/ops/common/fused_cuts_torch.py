"""Blocks of queries and keys for PyTorch's fused kernel, and their masks."""

import dataclasses

import torch

from keras_efficient_attn.ops.common import masks
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO
from keras_efficient_attn.ops.common.plan import block_sizes


def mask_words(mask_fn):
    """The name of a mask function of `masks`, and its fields as integers."""
    fields = (getattr(mask_fn, name) for name in mask_fn.__dataclass_fields__)
    return " ".join([type(mask_fn).__name__, *(f"{int(field)}" for field in fields)])


def _mask_fn(words):
    name, *numbers = words.split()
    return getattr(masks, name)(*map(int, numbers))


def make_cuts(query, key, tensors, kind, mask):
    """The `Cut`s for a call of `attend_op`."""
    whole = (0, query.shape[1]), (0, key.shape[1])
    if kind == "band":
        return _band_cuts(query, key, _mask_fn(mask), *tensors)
    if kind == "shared":
        return _shared_cuts(query, _mask_fn(mask), *tensors)
    if kind == "weighted":
        return [Cut(tensors[0][:, :, None], False, *whole)]
    if kind.endswith("codes"):
        return _code_cuts(query, kind == "earlier codes", tensors)
    allowed = tensors[0]
    allowed = allowed[:, None] if allowed.ndim == 3 else allowed[None, None]
    return [Cut(*_mask(allowed, query.dtype), *whole)]


def _band_cuts(query, key, mask_fn, start=None):
    (batch, length), keys, period = query.shape[:2], key.shape[1], mask_fn.period
    # The reach of a block, and the number of keys before the first query.
    before, earlier = mask_fn.before, 0
    if start is not None:
        before = earlier = mask_fn.reach
    start = 0 if start is None else int(start)
    # A wide band justifies larger blocks, whose keys overlap less.
    block = max(block_sizes().block, (before + mask_fn.after) // 8)
    block = max(1, block // period) * period
    # The kernel is faster at numbers of keys that fill its vectors.
    before += -(before + block + mask_fn.after) % 16
    width = before + block + mask_fn.after

    def cut(number, count=1, row=None):
        first = number * block
        first_key = first + earlier - before
        last_key = min(first_key + width, keys)
        first_key = max(first_key, 0)
        size, wide = min(block, length - first), last_key - first_key
        i = start + first + torch.arange(size)[:, None]
        j = start - earlier + first_key + torch.arange(wide)
        mask = _mask(mask_fn(i, j)[None, None], query.dtype)
        return Cut(*mask, (first, size), (first_key, wide), block, count, row)

    blocks = -(-length // block)
    # Blocks whose keys all exist have the same mask.
    first = min(-(-max(before - earlier, 0) // block), blocks)
    last = min(length // block, (keys - earlier - mask_fn.after) // block)
    if last - first > batch:
        cuts = [cut(first, last - first, row) for row in range(batch)]
        edges = [*range(first), *range(last, blocks)]
    else:
        cuts, edges = [], range(blocks)
    return cuts + [cut(number) for number in edges]


def _shared_cuts(query, mask_fn, i, j):
    block, cuts = 2 * block_sizes().block, []
    for first in range(0, query.shape[1], block):
        rows = i[first : first + block]
        allowed = mask_fn(rows[:, None], j[:, None])
        # Drop the last keys, which are often later than all queries.
        seen = allowed.any(0).any(0).nonzero()
        last = int(seen[-1]) + 1 if len(seen) else 1
        mask = _mask(allowed[None, ..., :last], query.dtype)
        cuts.append(Cut(*mask, (first, len(rows)), (0, last)))
    return cuts


def _code_cuts(query, earlier, codes):
    """Blocks of one row each, whose masks are small."""
    if max(int(code.max()) for code in codes) < 2**15:
        # Narrow integers are compared faster.
        codes = [code.to(torch.int16) for code in codes]
    (batch, length), block, cuts = query.shape[:2], 4 * block_sizes().block, []
    for row in range(batch):
        code, before = (code[row] for code in codes)
        for first in range(0, length, block):
            size = min(block, length - first)
            keys = first + size if earlier else length
            spans = (first, size), (0, keys)
            ids = code, before, earlier, query.dtype
            cuts.append(CodeCut(None, False, *spans, keys, 1, row, *ids))
    return cuts


def _mask(allowed, dtype):
    """A mask for the logits, and whether query `i` of a block sees keys `0..i` only."""
    lower = not allowed.triu(1).any()
    return torch.where(allowed, 0.0, LOG_ZERO).to(dtype), lower


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """Consecutive blocks of queries, and the keys that each may see.

    Attributes:
        mask: `(rows or blocks or 1, heads or 1, queries, keys)`, added to the logits.
        causal: Whether query `i` of a block sees only keys `0..i`; other pairs are not
            computed.
        queries: The first query, and the number of queries per block.
        keys: The first key, and the number of keys per block.
        step: Distance between consecutive blocks.
        count: Number of blocks.
        row: The row of the batch, if there are several blocks; a single block has all
            rows.
    """

    mask: torch.Tensor
    causal: bool
    queries: tuple
    keys: tuple
    step: int = 0
    count: int = 1
    row: int | None = None

    def select(self, x, span):
        """`(batch, length, heads, ...)` as `(rows or blocks, heads, span, ...)`."""
        first, size = span
        if self.row is None:
            return x[:, first : first + size].transpose(1, 2)
        x = x[self.row, first : first + (self.count - 1) * self.step + size]
        x = x.unfold(0, size, self.step)
        return x.transpose(2, 3) if x.ndim == 4 else x

    def is_whole(self, query, key):
        """Whether all queries see all keys in one block of each row."""
        spans = (0, query.shape[1]), (0, key.shape[1])
        return self.row is None and (self.queries, self.keys) == spans

    def full_mask(self, valid):
        """The mask, combined with missing keys if there are any."""
        if valid is None:
            return self.mask
        valid = valid if valid.ndim == 3 else valid[..., None]
        exists = self.select(valid, self.keys)[:, :, None] > 0
        return self.mask if exists.all() else torch.where(exists, self.mask, LOG_ZERO)

    def add(self, grad, grad_keys):
        """Adds gradients of overlapping blocks of keys to those of all keys."""
        first, size = self.keys
        step = self.step or size
        for start in range(0, size, step):
            span = first + start, min(step, size - start)
            piece = grad_keys[:, :, start : start + step]
            self.select(grad, span).add_(piece)


@dataclasses.dataclass(frozen=True, eq=False)
class CodeCut(Cut):
    """A block of queries that see other positions by their codes.

    The mask is made for each use: all masks together hold every pair.

    Attributes:
        code: Integers `(heads, rounds, length)`: the code that a position has, and
            sees.
        before: A second code that it sees.
        earlier: Whether it sees earlier positions only.
        dtype: Of the mask.
    """

    code: torch.Tensor | None = None
    before: torch.Tensor | None = None
    earlier: bool = False
    dtype: torch.dtype = torch.float32

    def full_mask(self, valid):
        first, size = self.queries
        i, j = torch.arange(first, first + size)[:, None], torch.arange(self.keys[1])
        seen = torch.zeros((), dtype=torch.bool)
        for r in range(self.code.shape[1]):
            key_codes = self.code[:, r, None, : len(j)]
            for codes in self.code, self.before:
                query_codes = codes[:, r, first : first + size, None]
                seen = seen | (key_codes == query_codes)
        seen = seen & (j < i if self.earlier else j != i)
        return torch.where(seen[None], 0.0, LOG_ZERO).to(self.dtype)
