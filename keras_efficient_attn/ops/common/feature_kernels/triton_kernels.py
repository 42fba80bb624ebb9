"""The Triton kernels of linear attention.

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
`(batch, heads, length)`; states `(batch * heads, slots, size)`, where the `size` floats
of a slot are the sum `(features, value_dim)` and the normalizer `(features,)`. Tensors
are contiguous, rows and states float32.
"""

import dataclasses
import typing

import triton
import triton.language as tl

LOG_ZERO = tl.constexpr(-1e30)
FEATURE_FLOOR = tl.constexpr(1e-15)
RELU_FLOOR = tl.constexpr(1e-3)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The compile-time constants of all kernels, as one argument.

    Attributes:
        entry: The `entry` of `Entrywise`.
        dim, features, value_dim: Sizes.
        causal: Whether query `t` sees keys `0..t` only.
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
    causal: bool
    normalize: bool
    span: int
    tile: int
    block_dim: int
    block_features: int
    block_values: int
    rounded: bool
    precision: str
    interpreted: bool

    @property
    def state_size(self):
        return self.features * (self.value_dim + 1)


class Side(typing.NamedTuple):
    """Queries or keys. Rows that are not needed are `None`.

    Attributes:
        x: Positions, the input of the features.
        rows: `(features, dim)` that `x` is multiplied by, or `None`.
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
def _load_rows(side, columns, places, plan: tl.constexpr):
    """A block `(columns, places)` of the rows that `x` is multiplied by."""
    mask = (columns < plan.features)[:, None] & (places < plan.dim)[None, :]
    at = columns[:, None] * plan.dim + places[None, :]
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
            part = _load(side.x, side, head, tile, dims, plan.dim, plan)
            rows = tl.trans(_load_rows(side, columns, dims, plan))
            # In bfloat16, the exponents of features would lose too much precision.
            x = tl.dot(part.to(tl.float32), rows, x, input_precision=plan.precision)
    return x


@triton.jit
def _features(side, head, tile, columns, plan: tl.constexpr):
    """`(tile, columns)` of the features; 0 for hidden positions."""
    x = _entries(side, head, tile, columns, plan)
    # Comparisons are written to preserve NaN.
    if plan.entry == "elu":
        x = tl.where(x > 0.0, x + 1.0, tl.exp(tl.where(x > 0.0, 0.0, x)))
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
def _state(states, slots, head, tile, plan: tl.constexpr, KEYS: tl.constexpr):
    """The slot of a tile: queries read earlier segments, keys later ones."""
    slot = head.to(tl.int64) * slots
    if plan.causal:
        slot += tile // plan.span + (1 if KEYS else 0)
    return states + slot * plan.state_size


@triton.jit
def _load_sums(state, columns, values, plan: tl.constexpr):
    mask = (columns < plan.features)[:, None] & (values < plan.value_dim)[None, :]
    at = columns[:, None] * plan.value_dim + values[None, :]
    return tl.load(state + at, mask=mask, other=0.0)


@triton.jit
def _load_normalizer(state, columns, plan: tl.constexpr):
    at = plan.features * plan.value_dim + columns
    return tl.load(state + at, mask=columns < plan.features, other=0.0)


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
def _score(own, other, head, tile, other_tile, plan: tl.constexpr, KEYS: tl.constexpr):
    """Weighted products of features, `(tile, other_tile)`."""
    scores = tl.full([plan.tile, plan.tile], 0.0, tl.float32)
    for start in range(0, plan.features, plan.block_features):
        columns = start + tl.arange(0, plan.block_features)
        x = _features(own, head, tile, columns, plan)
        theirs = _features(other, head, other_tile, columns, plan)
        scores = _product(x, tl.trans(theirs), scores, plan)
    return _weigh(scores, own, other, head, tile, other_tile, plan, KEYS)


@triton.jit
def _grad_scores(
    own, other, head, tile, other_tile, plan: tl.constexpr, KEYS: tl.constexpr
):
    """Weighted gradients of scores, `(tile, other_tile)`."""
    pairs = tl.full([plan.tile, plan.tile], 0.0, tl.float32)
    for start in range(0, plan.value_dim, plan.block_values):
        values = start + tl.arange(0, plan.block_values)
        x = _load(own.vectors, own, head, tile, values, plan.value_dim, plan)
        theirs = _load(
            other.vectors, other, head, other_tile, values, plan.value_dim, plan
        )
        pairs = _product(x, tl.trans(theirs), pairs, plan)
    if KEYS:
        pairs += _load_row(other.bias, other, head, other_tile, 0.0, plan)[None, :]
    else:
        pairs += _load_row(own.bias, own, head, tile, 0.0, plan)[:, None]
    return _weigh(pairs, own, other, head, tile, other_tile, plan, KEYS)


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
def sum_segments(side, states, slots, plan: tl.constexpr, KEYS: tl.constexpr):
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
    slot = head.to(tl.int64) * slots + segment
    if plan.causal and KEYS:
        slot += 1
    state = states + slot * plan.state_size
    existing = columns < plan.features
    mask = existing[:, None] & (values < plan.value_dim)[None, :]
    tl.store(
        state + columns[:, None] * plan.value_dim + values[None, :], sums, mask=mask
    )
    at = plan.features * plan.value_dim + columns
    tl.store(state + at, normalizer, mask=existing & (tl.program_id(2) == 0))


@triton.jit
def accumulate(
    states,
    factors,
    slots,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BACKWARDS: tl.constexpr,
):
    """Adds the previous (or next) slot, times a factor, to each slot."""
    head = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    first = head * slots + (slots - 1 if BACKWARDS else 0)
    # Advance step by step: a multiple of the size may exceed 32 bits.
    pointers = states + first * SIZE + columns
    state = tl.full([BLOCK], 0.0, tl.float32)
    for index in range(slots):
        slot = (slots - 1 - index) if BACKWARDS else index
        if factors is not None:
            between = slot if BACKWARDS else slot - 1
            inside = (between >= 0) & (between < slots - 1)
            start = head * (slots - 1)
            state *= tl.load(factors + start + between, mask=inside, other=0.0)
        state += tl.load(pointers, mask=mask, other=0.0)
        tl.store(pointers, state, mask=mask)
        pointers += -SIZE if BACKWARDS else SIZE


@triton.jit
def read_states(
    own, other, states, output, totals, slots, plan: tl.constexpr, KEYS: tl.constexpr
):
    """Reads the other side's vectors for each position: outputs, or value gradients.

    `totals`, if given, receives the sums of weights, or their reciprocals if outputs
    are normalized.
    """
    head, tile = _program(own, plan)
    values = tl.program_id(1) * plan.block_values + tl.arange(0, plan.block_values)
    state = _state(states, slots, head, tile, plan, KEYS)
    sums = tl.full([plan.tile, plan.block_values], 0.0, tl.float32)
    total = tl.full([plan.tile], 0.0, tl.float32)
    for start in range(0, plan.features, plan.block_features):
        columns = start + tl.arange(0, plan.block_features)
        x = _features(own, head, tile, columns, plan)
        if own.far is not None:
            x *= _load_row(own.far, own, head, tile, 0.0, plan)[:, None]
        sums = _product(x, _load_sums(state, columns, values, plan), sums, plan)
        if totals is not None:
            total += tl.sum(x * _load_normalizer(state, columns, plan)[None, :], 1)
    if plan.causal:
        first, last = _seen_tiles(own, tile, plan, KEYS)
        for index in range(first, last):
            scores = _score(own, other, head, tile, index, plan, KEYS)
            vectors = _load(
                other.vectors, other, head, index, values, plan.value_dim, plan
            )
            sums = _product(scores, vectors, sums, plan)
            total += tl.sum(scores, 1)
    if totals is not None:
        if plan.normalize:
            visible = tl.abs(total) > 1e-30
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
    own, other, state, tile, columns, plan: tl.constexpr, KEYS: tl.constexpr
):
    """Gradients of a block of features, `(tile, columns)`."""
    head, _ = _program(own, plan)
    grad = tl.full([plan.tile, plan.block_features], 0.0, tl.float32)
    for start in range(0, plan.value_dim, plan.block_values):
        values = start + tl.arange(0, plan.block_values)
        vectors = _load(own.vectors, own, head, tile, values, plan.value_dim, plan)
        sums = _load_sums(state, columns, values, plan)
        grad = _product(vectors, tl.trans(sums), grad, plan)
    normalizer = _load_normalizer(state, columns, plan)[None, :]
    if own.bias is not None:
        normalizer *= _load_row(own.bias, own, head, tile, 0.0, plan)[:, None]
    grad += normalizer
    if own.far is not None:
        grad *= _load_row(own.far, own, head, tile, 0.0, plan)[:, None]
    if plan.causal:
        first, last = _seen_tiles(own, tile, plan, KEYS)
        for index in range(first, last):
            pairs = _grad_scores(own, other, head, tile, index, plan, KEYS)
            theirs = _features(other, head, index, columns, plan)
            grad = _product(pairs, theirs, grad, plan)
    return grad


@triton.jit
def find_gradients(
    own, other, states, output, grad_log, slots, plan: tl.constexpr, KEYS: tl.constexpr
):
    """Gradients of `x`, and of log weights where `grad_log` is given.

    A program computes a block of the columns of `x`. Without rows these are features;
    with rows the program iterates over all features. `grad_log` has a row per block of
    features, to be summed, or per block of `x`, all equal.
    """
    head, tile = _program(own, plan)
    state = _state(states, slots, head, tile, plan, KEYS)
    along = tl.full([plan.tile], 0.0, tl.float32)
    if own.rows is None:
        dims = tl.program_id(1) * plan.block_features
        dims += tl.arange(0, plan.block_features)
        grad = _grad_features(own, other, state, tile, dims, plan, KEYS)
        x = _features(own, head, tile, dims, plan)
        along += tl.sum(grad * x, 1)
        grad *= _slopes(x, plan)
    else:
        dims = tl.program_id(1) * plan.block_dim + tl.arange(0, plan.block_dim)
        grad = tl.full([plan.tile, plan.block_dim], 0.0, tl.float32)
        for start in range(0, plan.features, plan.block_features):
            columns = start + tl.arange(0, plan.block_features)
            part = _grad_features(own, other, state, tile, columns, plan, KEYS)
            x = _features(own, head, tile, columns, plan)
            along += tl.sum(part * x, 1)
            part *= _slopes(x, plan)
            rows = _load_rows(own, columns, dims, plan)
            grad = tl.dot(part, rows, grad, input_precision=plan.precision)
    kept = _is_kept(own, head, tile, plan)
    if grad_log is not None:
        heads = tl.num_programs(0) // tl.cdiv(own.length, plan.tile)
        row = tl.program_id(1) * heads + head
        _store_row(grad_log, tl.where(kept, along, 0.0), own, row, tile, plan)
    grad = tl.where(kept[:, None], grad, 0.0)
    _store(output, grad, own, head, tile, dims, plan.dim, plan)
