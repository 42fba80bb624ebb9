"""The Triton kernels of causal linear attention.

For one head, with segments of positions that share a state, and log weights `l`:

```
states[c]     = states before segment c, relative to the maximum of `l` before it
values[t]     = Σ_s near[t, s] φ(q[t])·φ(k[s]) v[s] + far[t] φ(q[t]) states[c]
near[t, s]    = exp(l[s] − running maximum[t]), for keys s <= t of the segment
```

The gradient of a value has the form of an output, and the gradient of a key's features
has the form of a query's. Queries and keys swap roles, and the gradients of states come
from later segments. Each kernel therefore takes two sides, `own` and `other`.

Positions are `(batch, length, heads, dim)`; rows, one number for each position,
`(batch, heads, length)`. Tensors are contiguous, rows float32.
"""

import dataclasses
import typing

import triton
import triton.language as tl

LOG_ZERO = tl.constexpr(-1e30)
FEATURE_FLOOR = tl.constexpr(1e-15)
RELU_FLOOR = tl.constexpr(1e-3)
# Floats of a state that a program of `accumulate` adds up.
ACCUMULATED = tl.constexpr(1024)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The compile-time constants of all kernels, as one argument.

    Attributes:
        entry: The `entry` of `Entrywise`.
        dim, features, value_dim: Sizes.
        normalize: Whether outputs are divided by their totals.
        span: Tiles in a segment.
        tile: Positions in a tile.
        block_dim, block_features, block_values: Columns per block, powers of 2.
        rounded: Whether products use bfloat16 operands; they accumulate in float32.
        precision: Precision of float32 products.
        interpreted: Whether Triton's interpreter runs the kernels.
    """

    entry: str
    dim: int
    features: int
    value_dim: int
    normalize: bool
    span: int
    tile: int
    block_dim: int
    block_features: int
    block_values: int
    rounded: bool
    precision: str
    interpreted: bool


class States(typing.NamedTuple):
    """States before or after segments.

    Attributes:
        sums: `(batch * heads, slots, features, value_dim)`.
        normalizers: `(batch * heads, slots, features)`, float32.
        slots: Number of states of a head.
    """

    sums: typing.Any
    normalizers: typing.Any
    slots: int


class Ends(typing.NamedTuple):
    """What `accumulate` starts from, and where it ends.

    Attributes:
        first: `(batch * heads, features * (value_dim + 1))`, sums and normalizer of the
            first slot, or `None` for 0.
        last: Receives those of the last slot.
        factors: `(batch * heads, slots - 1)`, between slots, or `None` for 1.
    """

    first: typing.Any
    last: typing.Any
    factors: typing.Any


class Side(typing.NamedTuple):
    """Queries or keys. Rows that are not needed are `None`.

    Attributes:
        x: Positions, the input of the features.
        rows: `(features, dim)` that `x` is multiplied by, or `None`. In bfloat16, two
            such matrices, to be added.
        vectors: Positions: values of keys, or gradients of the queries' outputs.
        maxima: Rows that are subtracted before an exponential.
        log: Rows: log weights of keys, running maxima of queries.
        far: Rows: factors between the side and the states.
        bias: Rows: gradients of totals; `None` for 1 each.
        length, heads: Sizes.
    """

    x: typing.Any
    rows: typing.Any
    vectors: typing.Any
    maxima: typing.Any
    log: typing.Any
    far: typing.Any
    bias: typing.Any
    length: int
    heads: int


@triton.jit
def _program(side, plan: tl.constexpr):
    """The head and the tile of a program."""
    tiles = tl.cdiv(side.length, plan.tile)
    return tl.program_id(0) // tiles, tl.program_id(0) % tiles


@triton.jit
def _places(tile, plan: tl.constexpr):
    return tile * plan.tile + tl.arange(0, plan.tile)


@triton.jit
def _load_row(row, side, head, tile, otherwise: tl.constexpr, plan: tl.constexpr):
    start = row + head.to(tl.int64) * side.length + tile * plan.tile
    mask = _places(tile, plan) < side.length
    return tl.load(start + tl.arange(0, plan.tile), mask=mask, other=otherwise)


@triton.jit
def _store_row(row, x, side, head, tile, plan: tl.constexpr):
    start = row + head.to(tl.int64) * side.length + tile * plan.tile
    mask = _places(tile, plan) < side.length
    tl.store(start + tl.arange(0, plan.tile), x, mask=mask)


@triton.jit
def _pointers(x, side, head, tile, columns, DIM: tl.constexpr, plan: tl.constexpr):
    """Pointers to positions of a head, as a matrix `(tile, columns)`."""
    batch = (head // side.heads).to(tl.int64)
    first = batch * side.length + tile * plan.tile
    start = x + (first * side.heads + head % side.heads) * DIM
    # In 32 bits, relative to the tile's start, because addresses occupy registers.
    rows = tl.arange(0, plan.tile) * (side.heads * DIM)
    return start + (rows[:, None] + columns[None, :])


@triton.jit
def _load(x, side, head, tile, columns, DIM: tl.constexpr, plan: tl.constexpr):
    """`(tile, columns)`; 0 for hidden positions, which are not read."""
    mask = _is_kept(side, head, tile, plan)[:, None] & (columns < DIM)[None, :]
    pointers = _pointers(x, side, head, tile, columns, DIM, plan)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _store(output, x, side, head, tile, columns, DIM: tl.constexpr, plan: tl.constexpr):
    mask = (_places(tile, plan) < side.length)[:, None] & (columns < DIM)[None, :]
    pointers = _pointers(output, side, head, tile, columns, DIM, plan)
    tl.store(pointers, x.to(output.dtype.element_ty), mask=mask)


@triton.jit
def _is_kept(side, head, tile, plan: tl.constexpr):
    """Whether positions exist and are not hidden."""
    kept = _places(tile, plan) < side.length
    if side.log is not None:
        kept = kept & (_load_row(side.log, side, head, tile, LOG_ZERO, plan) > LOG_ZERO)
    return kept


@triton.jit
def _product(a, b, total, plan: tl.constexpr):
    """`a @ b + total`, in float32."""
    if plan.rounded:
        a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)
    else:
        a, b = a.to(tl.float32), b.to(tl.float32)
    if plan.interpreted:
        # The interpreter multiplies bfloat16 bit patterns as integers.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=plan.precision)


@triton.jit
def _load_rows(side, columns, places, part, plan: tl.constexpr):
    """A block `(columns, places)` of a part of the rows that `x` is multiplied by."""
    mask = (columns < plan.features)[:, None] & (places < plan.dim)[None, :]
    at = part * plan.features * plan.dim + columns[:, None] * plan.dim + places[None, :]
    return tl.load(side.rows + at, mask=mask, other=0.0)


@triton.jit
def _entries(side, head, tile, columns, plan: tl.constexpr):
    """The arguments of the entry function, `(tile, columns)`."""
    if side.rows is None:
        x = _load(side.x, side, head, tile, columns, plan.dim, plan).to(tl.float32)
    else:
        x = tl.full([plan.tile, plan.block_features], 0.0, tl.float32)
        for start in range(0, plan.dim, plan.block_dim):
            dims = start + tl.arange(0, plan.block_dim)
            own = _load(side.x, side, head, tile, dims, plan.dim, plan)
            rows = tl.trans(_load_rows(side, columns, dims, 0, plan))
            # The exponents of features need more precision than bfloat16.
            if side.rows.dtype.element_ty == tl.bfloat16:
                x = _product(own, rows, x, plan)
                rows = tl.trans(_load_rows(side, columns, dims, 1, plan))
                x = _product(own, rows, x, plan)
            else:
                x = tl.dot(own.to(tl.float32), rows, x, input_precision=plan.precision)
    return x


@triton.jit
def _features(side, head, tile, columns, plan: tl.constexpr):
    """`(tile, columns)` of the features; 0 for hidden positions."""
    x = _entries(side, head, tile, columns, plan)
    # Comparisons are written to preserve NaN.
    if plan.entry == "elu":
        x = tl.where(x > 0.0, x + 1.0, tl.exp(tl.where(x > 0.0, 0.0, x)))
        x = tl.where(x < FEATURE_FLOOR, FEATURE_FLOOR, x)
    elif plan.entry == "relu":
        x = tl.where(x < 0.0, 0.0, x) + RELU_FLOOR
    elif plan.entry == "exp":
        maxima = _load_row(side.maxima, side, head, tile, 0.0, plan)
        x = tl.exp(x - maxima[:, None]) + FEATURE_FLOOR
    kept = _is_kept(side, head, tile, plan)
    return tl.where(kept[:, None] & (columns < plan.features)[None, :], x, 0.0)


@triton.jit
def _slopes(features, plan: tl.constexpr):
    """The derivative of the entry function, from its value."""
    if plan.entry == "elu":
        slopes = tl.minimum(features, 1.0)
    elif plan.entry == "relu":
        slopes = tl.where(features > RELU_FLOOR, 1.0, 0.0)
    elif plan.entry == "exp":
        slopes = features
    else:
        slopes = tl.full(features.shape, 1.0, tl.float32)
    return slopes


@triton.jit
def _slot(states, head, tile, plan: tl.constexpr, KEYS: tl.constexpr):
    """The slot of a tile: queries read earlier segments, keys later ones."""
    return head.to(tl.int64) * states.slots + tile // plan.span + (1 if KEYS else 0)


@triton.jit
def _sums_at(states, slot, columns, values, plan: tl.constexpr):
    """Pointers to a block `(columns, values)` of a state's sums, and the mask."""
    mask = (columns < plan.features)[:, None] & (values < plan.value_dim)[None, :]
    start = states.sums + slot * (plan.features * plan.value_dim)
    return start + (columns[:, None] * plan.value_dim + values[None, :]), mask


@triton.jit
def _load_sums(states, slot, columns, values, plan: tl.constexpr):
    pointers, mask = _sums_at(states, slot, columns, values, plan)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _load_normalizer(states, slot, columns, plan: tl.constexpr):
    at = states.normalizers + slot * plan.features + columns
    return tl.load(at, mask=columns < plan.features, other=0.0)


@triton.jit
def _weigh(
    pairs, own, other, head, tile, other_tile, plan: tl.constexpr, KEYS: tl.constexpr
):
    """Scores or their gradients, weighted, with later keys hidden."""
    places = _places(tile, plan)[:, None]
    others = _places(other_tile, plan)[None, :]
    if own.log is not None:
        shift = _load_row(own.log, own, head, tile, 0.0, plan)[:, None]
        shift -= _load_row(other.log, other, head, other_tile, 0.0, plan)[None, :]
        # Positive only for hidden keys.
        pairs *= tl.exp(tl.minimum(shift if KEYS else -shift, 0.0))
    return tl.where(places <= others if KEYS else places >= others, pairs, 0.0)


@triton.jit
def _score(
    own, other, x, head, tile, other_tile, plan: tl.constexpr, KEYS: tl.constexpr
):
    """Weighted products of features, `(tile, other_tile)`.

    `x` holds the tile's own features if these are one block.
    """
    scores = tl.full([plan.tile, plan.tile], 0.0, tl.float32)
    for start in range(0, plan.features, plan.block_features):
        columns = start + tl.arange(0, plan.block_features)
        if plan.features > plan.block_features:
            x = _features(own, head, tile, columns, plan)
        theirs = _features(other, head, other_tile, columns, plan)
        scores = _product(x, tl.trans(theirs), scores, plan)
    return _weigh(scores, own, other, head, tile, other_tile, plan, KEYS)


@triton.jit
def _grad_scores(
    own, other, vectors, head, tile, other_tile, plan: tl.constexpr, KEYS: tl.constexpr
):
    """Weighted gradients of scores, `(tile, other_tile)`.

    `vectors` holds the tile's own vectors if these are one block.
    """
    pairs = tl.full([plan.tile, plan.tile], 0.0, tl.float32)
    for start in range(0, plan.value_dim, plan.block_values):
        values = start + tl.arange(0, plan.block_values)
        if plan.value_dim > plan.block_values:
            vectors = _load(own.vectors, own, head, tile, values, plan.value_dim, plan)
        theirs = _load(
            other.vectors, other, head, other_tile, values, plan.value_dim, plan
        )
        pairs = _product(vectors, tl.trans(theirs), pairs, plan)
    if KEYS:
        pairs += _load_row(other.bias, other, head, other_tile, 0.0, plan)[None, :]
    else:
        pairs += _load_row(own.bias, own, head, tile, 0.0, plan)[:, None]
    return _weigh(pairs, own, other, head, tile, other_tile, plan, KEYS)


@triton.jit
def weigh_gradients(side, grad, output, totals, weighed, bias, plan: tl.constexpr):
    """Gradients of undivided values and totals, from those of normalized outputs."""
    head, tile = _program(side, plan)
    total = _load_row(totals, side, head, tile, 0.0, plan)
    along = tl.full([plan.tile], 0.0, tl.float32)
    for start in range(0, plan.value_dim, plan.block_values):
        values = start + tl.arange(0, plan.block_values)
        x = _load(grad, side, head, tile, values, plan.value_dim, plan).to(tl.float32)
        out = _load(output, side, head, tile, values, plan.value_dim, plan)
        along += tl.sum(x * out.to(tl.float32), 1)
        x *= total[:, None]
        _store(weighed, x, side, head, tile, values, plan.value_dim, plan)
    _store_row(bias, -along * total, side, head, tile, plan)


@triton.jit
def find_maxima(side, output, plan: tl.constexpr):
    """The largest entry of each position, as rows."""
    head, tile = _program(side, plan)
    largest = tl.full([plan.tile], float("-inf"), tl.float32)
    for start in range(0, plan.features, plan.block_features):
        columns = start + tl.arange(0, plan.block_features)
        x = _entries(side, head, tile, columns, plan)
        x = tl.where((columns < plan.features)[None, :], x, float("-inf"))
        largest = tl.maximum(largest, tl.max(x, 1))
    _store_row(output, largest, side, head, tile, plan)


@triton.jit
def sum_segments(side, states, plan: tl.constexpr, KEYS: tl.constexpr):
    """The sums over each segment; one program per block of its matrix."""
    segments = tl.cdiv(side.length, plan.tile * plan.span)
    head, segment = tl.program_id(0) // segments, tl.program_id(0) % segments
    columns = tl.program_id(1) * plan.block_features
    columns += tl.arange(0, plan.block_features)
    values = tl.program_id(2) * plan.block_values + tl.arange(0, plan.block_values)
    sums = tl.full([plan.block_features, plan.block_values], 0.0, tl.float32)
    normalizer = tl.full([plan.block_features], 0.0, tl.float32)
    tiles = tl.cdiv(side.length, plan.tile)
    for tile in range(segment * plan.span, min((segment + 1) * plan.span, tiles)):
        x = _features(side, head, tile, columns, plan)
        if side.far is not None:
            x *= _load_row(side.far, side, head, tile, 0.0, plan)[:, None]
        vectors = _load(side.vectors, side, head, tile, values, plan.value_dim, plan)
        sums = _product(tl.trans(x), vectors, sums, plan)
        if side.bias is not None:
            x *= _load_row(side.bias, side, head, tile, 0.0, plan)[:, None]
        normalizer += tl.sum(x, 0)
    slot = head.to(tl.int64) * states.slots + segment
    if KEYS:
        slot += 1
    pointers, mask = _sums_at(states, slot, columns, values, plan)
    tl.store(pointers, sums.to(states.sums.dtype.element_ty), mask=mask)
    at = states.normalizers + slot * plan.features + columns
    tl.store(at, normalizer, mask=(columns < plan.features) & (tl.program_id(2) == 0))


@triton.jit
def accumulate(states, ends, plan: tl.constexpr, BACKWARDS: tl.constexpr):
    """Adds the previous (or next) slot, times a factor, to each slot."""
    blocks = tl.cdiv(plan.features * plan.value_dim, ACCUMULATED)
    block = tl.program_id(1)
    if block < blocks:
        _accumulate(states.sums, states.slots, ends, block, plan, False, BACKWARDS)
    else:
        block -= blocks
        _accumulate(
            states.normalizers, states.slots, ends, block, plan, True, BACKWARDS
        )


@triton.jit
def _accumulate(
    states,
    slots,
    ends,
    block,
    plan: tl.constexpr,
    NORMALIZERS: tl.constexpr,
    BACKWARDS: tl.constexpr,
):
    """Computes `accumulate` for a block of the sums or of the normalizers."""
    sums: tl.constexpr = plan.features * plan.value_dim
    size: tl.constexpr = plan.features if NORMALIZERS else sums
    head = tl.program_id(0).to(tl.int64)
    columns = block * ACCUMULATED + tl.arange(0, ACCUMULATED)
    mask = columns < size
    at = head * (sums + plan.features) + (sums if NORMALIZERS else 0) + columns
    if ends.first is None:
        state = tl.full([ACCUMULATED], 0.0, tl.float32)
    else:
        state = tl.load(ends.first + at, mask=mask, other=0.0)
    # Advance step by step: a multiple of the size may exceed 32 bits.
    pointers = states + (head * slots + (slots - 1 if BACKWARDS else 0)) * size
    pointers += columns
    tl.store(pointers, state.to(states.dtype.element_ty), mask=mask)
    for index in range(1, slots):
        pointers += -size if BACKWARDS else size
        if ends.factors is not None:
            between = (slots - 1 - index) if BACKWARDS else index - 1
            state *= tl.load(ends.factors + head * (slots - 1) + between)
        state += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        tl.store(pointers, state.to(states.dtype.element_ty), mask=mask)
    tl.store(ends.last + at, state, mask=mask)


@triton.jit
def read_states(
    own, other, states, output, totals, plan: tl.constexpr, KEYS: tl.constexpr
):
    """Reads the other side's vectors for each position: outputs, or value gradients.

    `totals`, if given, receives the sums of weights, or their reciprocals if outputs
    are normalized.
    """
    head, tile = _program(own, plan)
    values = tl.program_id(1) * plan.block_values + tl.arange(0, plan.block_values)
    slot = _slot(states, head, tile, plan, KEYS)
    sums = tl.full([plan.tile, plan.block_values], 0.0, tl.float32)
    total = tl.full([plan.tile], 0.0, tl.float32)
    x = tl.full([plan.tile, plan.block_features], 0.0, tl.float32)
    for start in range(0, plan.features, plan.block_features):
        columns = start + tl.arange(0, plan.block_features)
        x = _features(own, head, tile, columns, plan)
        far = x
        if own.far is not None:
            far *= _load_row(own.far, own, head, tile, 0.0, plan)[:, None]
        state = _load_sums(states, slot, columns, values, plan)
        sums = _product(far, state, sums, plan)
        if totals is not None:
            normalizer = _load_normalizer(states, slot, columns, plan)
            total += tl.sum(far * normalizer[None, :], 1)
    first, last = _seen_tiles(own, tile, plan, KEYS)
    for index in range(first, last):
        scores = _score(own, other, x, head, tile, index, plan, KEYS)
        vectors = _load(other.vectors, other, head, index, values, plan.value_dim, plan)
        sums = _product(scores, vectors, sums, plan)
        total += tl.sum(scores, 1)
    if totals is not None:
        if plan.normalize:
            visible = tl.abs(total) > 1.2e-38
            total = tl.where(visible, 1.0 / tl.where(visible, total, 1.0), 0.0)
            sums *= total[:, None]
        if tl.program_id(1) == 0:
            _store_row(totals, total, own, head, tile, plan)
    _store(output, sums, own, head, tile, values, plan.value_dim, plan)


@triton.jit
def _seen_tiles(side, tile, plan: tl.constexpr, KEYS: tl.constexpr):
    """The range of tiles of its segment that a tile sees, or that see it."""
    first = tile // plan.span * plan.span
    last = tile + 1
    if KEYS:
        last = min(first + plan.span, tl.cdiv(side.length, plan.tile))
        first = tile
    return first, last


@triton.jit
def _grad_features(
    own, other, states, slot, tile, columns, plan: tl.constexpr, KEYS: tl.constexpr
):
    """Gradients of a block of features, `(tile, columns)`."""
    head, _ = _program(own, plan)
    grad = tl.full([plan.tile, plan.block_features], 0.0, tl.float32)
    vectors = tl.full([plan.tile, plan.block_values], 0.0, own.vectors.dtype.element_ty)
    for start in range(0, plan.value_dim, plan.block_values):
        values = start + tl.arange(0, plan.block_values)
        vectors = _load(own.vectors, own, head, tile, values, plan.value_dim, plan)
        sums = _load_sums(states, slot, columns, values, plan)
        grad = _product(vectors, tl.trans(sums), grad, plan)
    normalizer = _load_normalizer(states, slot, columns, plan)[None, :]
    if own.bias is not None:
        normalizer *= _load_row(own.bias, own, head, tile, 0.0, plan)[:, None]
    grad += normalizer
    if own.far is not None:
        grad *= _load_row(own.far, own, head, tile, 0.0, plan)[:, None]
    first, last = _seen_tiles(own, tile, plan, KEYS)
    for index in range(first, last):
        pairs = _grad_scores(own, other, vectors, head, tile, index, plan, KEYS)
        theirs = _features(other, head, index, columns, plan)
        grad = _product(pairs, theirs, grad, plan)
    return grad


@triton.jit
def find_gradients(
    own, other, states, output, grad_log, plan: tl.constexpr, KEYS: tl.constexpr
):
    """Gradients of `x`, and of log weights where `grad_log` is given.

    A program computes a block of the columns of `x`. Without rows these are features;
    with rows the program iterates over all features. `grad_log` has a row per block of
    features, to be summed, or per block of `x`, all equal.
    """
    head, tile = _program(own, plan)
    slot = _slot(states, head, tile, plan, KEYS)
    along = tl.full([plan.tile], 0.0, tl.float32)
    if own.rows is None:
        dims = tl.program_id(1) * plan.block_features
        dims += tl.arange(0, plan.block_features)
        grad = _grad_features(own, other, states, slot, tile, dims, plan, KEYS)
        x = _features(own, head, tile, dims, plan)
        if grad_log is not None:
            along += tl.sum(grad * x, 1)
        grad *= _slopes(x, plan)
    else:
        dims = tl.program_id(1) * plan.block_dim + tl.arange(0, plan.block_dim)
        grad = tl.full([plan.tile, plan.block_dim], 0.0, tl.float32)
        for start in range(0, plan.features, plan.block_features):
            columns = start + tl.arange(0, plan.block_features)
            part = _grad_features(own, other, states, slot, tile, columns, plan, KEYS)
            x = _features(own, head, tile, columns, plan)
            if grad_log is not None:
                along += tl.sum(part * x, 1)
            part *= _slopes(x, plan)
            rows = _load_rows(own, columns, dims, 0, plan)
            grad = _product(part, rows, grad, plan)
    kept = _is_kept(own, head, tile, plan)
    if grad_log is not None:
        heads = tl.num_programs(0) // tl.cdiv(own.length, plan.tile)
        row = tl.program_id(1) * heads + head
        _store_row(grad_log, tl.where(kept, along, 0.0), own, row, tile, plan)
    grad = tl.where(kept[:, None], grad, 0.0)
    _store(output, grad, own, head, tile, dims, plan.dim, plan)
