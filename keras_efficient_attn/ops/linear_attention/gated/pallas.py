"""Linear attention with a decay and a correction, in kernels for TPUs.

The formulae are those of `chunked`, and the kernels keep the state transposed, `(value
dim, features)`. A program iterates over the chunks of a head in order. The backward
pass runs forwards again and saves the state before each chunk and the inverse of each
chunk's `I + diag(β) P`; another kernel then runs backwards with the gradient of the
state after its chunk. With

```
R = V − (φ(K) ∘ exp(G)) S        U = (I + diag(β) P)⁻¹ diag(β) R
```

and the gradient dU of U, `N = (I + diag(β) P)⁻ᵀ dU` gives the gradients `diag(β) N` of
R, `−diag(β) N Uᵀ` of P below the diagonal, and the row sums of `N ∘ U / β` of β.

By the compiler's estimate for a TPU v5e, training of a whole layer takes with these
kernels, by their schedules, and in chunks (causal, 16,384 positions, 8 heads of 128,
bfloat16, 2026-11-29) 12.7 and 32.7 ms for the gated delta rule, and 7.7 and 17.3 ms for
retention:

    python -m tools.compile_for_tpu --lengths 16384 --heads 8 --head-dim 128 \\
        --layers gated-delta gated-delta:chunk_size=256 \\
        retention retention:chunk_size=256 \\
        --dtype mixed_bfloat16 --mode train --causal
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from keras_efficient_attn.ops.common import pallas_grid
from keras_efficient_attn.ops.common.chunking import pad_to
from keras_efficient_attn.ops.common.feature_kernels.choice import (
    LinearAttentionConfig,
)
from keras_efficient_attn.ops.common.feature_kernels.pallas_blocks import (
    along_rows,
    as_columns,
    as_rows,
    dot,
    keep_state,
    start,
)
from keras_efficient_attn.ops.common.online_softmax import divide
from keras_efficient_attn.ops.linear_attention.gated.chunked import (
    map_features,
)

# Positions per chunk, a power of two.
CHUNK = 128
# Maximum number of chunks per program, whose products the compiler overlaps.
CHUNKS = 2
# Replaces a β of 0 in the backward pass, which divides by it.
LEAST_BETA = 1e-20


def gated_attention(tensors, rates, state, map_weights, config, operand):
    """Computes `chunked_gated_attention` of rows of one document each.

    Args:
        tensors, rates, state, map_weights, config: As there, without a dtype of 64
            bits.
        operand: Dtype of the operands of products, which accumulate in float32.
    """
    length = tensors[0].shape[1]
    count = pl.cdiv(length, CHUNK)
    tensors, rates = (
        tuple(x if x is None else pad_to(x, count * CHUNK) for x in xs)
        for xs in (tensors, rates)
    )
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in tensors)
    # Maps without weights are computed by the kernels, of rows of positions.
    own_maps = config if config.rowwise_maps and not map_weights else None
    if own_maps is None:
        given = query[:, :, None], key[:, :, None]
        query, key = (x[:, :, 0] for x in map_features(config, *given, map_weights))
    inputs = {
        "query": query,
        "key": key,
        "value": value,
        "state": jnp.swapaxes(state, 2, 3),
    }
    log_decay, beta = rates
    if log_decay is None:
        log_decay = jnp.zeros((*tensors[0].shape[:3], 1), jnp.float32)
    if log_decay.shape[-1] == 1:
        inputs["log_decay"] = pallas_grid.to_row(log_decay[..., 0])
    else:
        inputs["log_decay"] = jnp.swapaxes(log_decay, 1, 2)
    if beta is not None:
        inputs["beta"] = pallas_grid.to_row(beta[..., 0])
    for name in ("query", "key", "value"):
        inputs[name] = inputs[name].astype(operand)
    chunks = next(n for n in range(CHUNKS, 0, -1) if count % n == 0)
    sizes = *query.shape[:2], count // chunks, chunks, CHUNK
    plan = _Plan(*sizes, operand, own_maps)
    outputs = _attend(plan, inputs)
    output = outputs["output"].astype(state.dtype)
    if config.output == "normalized":
        output = divide(output[..., :-1], output[..., -1])
    state = jnp.swapaxes(outputs["state"], 2, 3)
    return jnp.swapaxes(output, 1, 2)[:, :length], state


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The sizes of a call, as one static argument.

    Attributes:
        batch, heads: Sizes.
        blocks: Programs per head.
        chunks: Chunks per program.
        chunk: Positions per chunk.
        operand: Dtype of matrix operands; products accumulate in float32.
        maps: The `LinearAttentionConfig` whose maps the kernels compute, or `None`.
    """

    batch: int
    heads: int
    blocks: int
    chunks: int
    chunk: int
    operand: str
    maps: LinearAttentionConfig | None

    def features(self, query, key):
        """Features of queries and keys `(positions, dim)`; `None` for no queries."""
        if self.maps is None:
            return query, key
        mapped = map_features(self.maps, key if query is None else query, key, ())
        return None if query is None else mapped[0], mapped[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan, inputs):
    """The outputs of all positions, and the state after the last.

    Args:
        plan: `_Plan`.
        inputs: Dict of `"query"`, `"key"` and `"value"`, positions; `"log_decay"`,
            rows, or positions if decays differ by feature; `"beta"`, rows, for the
            delta rule; and `"state"`, a matrix `(value_dim, features)` for each head.

    Returns:
        Dict of `"output"`, positions, and `"state"`.
    """
    outputs = {"output": inputs["value"], "state": inputs["state"]}
    return _call(plan, gated_attention_forward, inputs, outputs)


def _forward(plan, inputs):
    return _attend(plan, inputs), inputs


def _backward(plan, inputs, gradients):
    by_chunk = plan.batch, plan.heads, plan.blocks * plan.chunks
    sizes = {"before": inputs["state"].shape[2:]}
    if "beta" in inputs:
        beta = inputs["beta"]
        inputs = {**inputs, "beta": jnp.where(beta == 0.0, LEAST_BETA, beta)}
        sizes["inverse"] = plan.chunk, plan.chunk
    saved = {
        name: jax.ShapeDtypeStruct((*by_chunk, *size), plan.operand)
        for name, size in sizes.items()
    }
    saved = _call(plan, gated_attention_forward, inputs, saved)
    given = {**inputs, **saved, "grad_output": gradients["output"]}
    given["state"] = gradients["state"]
    return (_call(plan, gated_attention_gradient, given, inputs, backwards=True),)


_attend.defvjp(_forward, _backward)


def _call(plan, kernel, inputs, outputs, backwards=False):
    """Runs a kernel, the last block first if `backwards`, with the state in scratch."""

    def at(i):
        return plan.blocks - 1 - i if backwards else i

    def spec(name, x):
        if name == "state":
            return pallas_grid.whole(x)
        if name in ("before", "inverse"):
            return pallas_grid.matrices(x, plan.chunks, at)
        size = plan.chunks * plan.chunk
        # At least a chunk of positions.
        is_row = x.shape[2] == 1
        return (pallas_grid.row if is_row else pallas_grid.positions)(x, size, at)

    specs = [
        {name: spec(name, x) for name, x in tensors.items()}
        for tensors in (inputs, outputs)
    ]
    scratch = {"state": pltpu.VMEM(inputs["state"].shape[2:], jnp.float32)}
    return pallas_grid.call(plan, kernel, inputs, outputs, specs, scratch)


class _Chunk:
    """A chunk's tensors.

    Attributes:
        decay: `_Decay` or `_DecayByFeature`.
        beta: Column, or `None`.
        query, key: Features of the chunk; no queries unless `with_query`.
        pull: Function from the gradients of both to those of the inputs.
        value: Tensor of the chunk.
        reader, far_key: Keys, decayed from the start of the chunk and to its end.
    """

    def __init__(self, plan, inputs, index, with_query=True):
        self.rows = pl.ds(index * plan.chunk, plan.chunk)
        self._inputs, self.beta = inputs, None
        log_decay = inputs["log_decay"]
        if log_decay.shape[0] == 1:
            self.decay = _Decay(plan, log_decay[:, self.rows])
        else:
            self.decay = _DecayByFeature(plan, log_decay[self.rows, :])
        if "beta" in inputs:
            (self.beta,) = as_columns(inputs["beta"][:, self.rows])
        query = self.load("query") if with_query else None
        key, self.value = self.load("key"), self.load("value")
        # The gradients of the tensors, from those of their features.
        (self.query, self.key), self.pull = jax.vjp(plan.features, query, key)
        self.far_key = self.key * self.decay.to_end
        self.reader = self.key * self.decay.from_start

    def load(self, name):
        return self._inputs[name][self.rows, :].astype(jnp.float32)


def gated_attention_forward(plan, inputs, outputs, state):
    start(inputs, {"state": state})
    chunks = [
        _Chunk(plan, inputs, index, "output" in outputs) for index in range(plan.chunks)
    ]
    inverses = None
    if "beta" in inputs:
        overlaps = [
            chunk.beta * chunk.decay.products([chunk.key], chunk.key)[0]
            for chunk in chunks
        ]
        inverses = _inverses(overlaps)
    before = state[...]
    for index, chunk in enumerate(chunks):
        update = chunk.value
        if inverses is not None:
            rest = chunk.value - dot(plan, chunk.reader, before, (1, 1))
            update = dot(plan, inverses[index], chunk.beta * rest)
        if "output" in outputs:
            (scores,) = chunk.decay.products([chunk.query], chunk.key)
            far_query = chunk.query * chunk.decay.from_start
            output = dot(plan, far_query, before, (1, 1)) + dot(plan, scores, update)
            outputs["output"][chunk.rows, :] = output.astype(outputs["output"].dtype)
        else:
            outputs["before"][index] = before.astype(plan.operand)
            if inverses is not None:
                outputs["inverse"][index] = inverses[index].astype(plan.operand)
        before = before * chunk.decay.whole + dot(plan, update, chunk.far_key, (0, 0))
    keep_state(plan, {"state": before}, {"state": state}, outputs)


def gated_attention_gradient(plan, inputs, outputs, state):
    """Computes all gradients, last block first; the state is that of its gradient."""
    start(inputs, {"state": state})
    after = state[...]
    for index in reversed(range(plan.chunks)):
        chunk = _Chunk(plan, inputs, index)
        decay, query, before = chunk.decay, chunk.query, inputs["before"][index]
        grad_output, corrects = chunk.load("grad_output"), chunk.beta is not None
        far_query, far_key, reader = (
            query * decay.from_start,
            chunk.far_key,
            chunk.reader,
        )
        lefts = [query, chunk.key] if corrects else [query]
        products = decay.products(lefts, chunk.key)
        update = chunk.value
        if corrects:
            inverse = inputs["inverse"][index]
            rest = chunk.value - dot(plan, reader, before, (1, 1))
            update = dot(plan, inverse, chunk.beta * rest)

        grad_update = dot(plan, products[0], grad_output, (0, 0))
        grad_update += dot(plan, far_key, after, (1, 1))
        grad_products = [dot(plan, grad_output, update, (1, 1))]
        grad_far_query = dot(plan, grad_output, before)
        grad_far_key = dot(plan, update, after)
        grad_before = after * decay.whole + dot(plan, grad_output, far_query, (0, 0))
        from_start = grad_far_query * far_query
        grad_key = grad_far_key * decay.to_end
        if corrects:
            solved = dot(plan, inverse, grad_update, (0, 0))
            grad_beta = along_rows(solved * update) / chunk.beta
            (outputs["beta"][:, chunk.rows],) = as_rows(grad_beta)
            grad_update = chunk.beta * solved
            grad_products.append(-dot(plan, grad_update, update, (1, 1)))
            grad_reader = -dot(plan, grad_update, before)
            grad_before -= dot(plan, grad_update, reader, (0, 0))
            from_start += grad_reader * reader
            grad_key += grad_reader * decay.from_start

        grad_lefts, of_key = decay.pull(lefts, chunk.key, products, grad_products)
        grad_query = grad_far_query * decay.from_start + grad_lefts[0]
        grad_key = sum(grad_lefts[1:], grad_key + of_key)
        whole = jnp.sum(after * before, axis=0, keepdims=True) * decay.whole
        grad_decay = decay.gradient(from_start, grad_far_key * far_key, whole)
        if grad_decay.shape[0] == 1:
            outputs["log_decay"][:, chunk.rows] = grad_decay
        else:
            outputs["log_decay"][chunk.rows, :] = grad_decay
        grad_query, grad_key = chunk.pull((grad_query, grad_key))
        gradients = {"query": grad_query, "key": grad_key, "value": grad_update}
        for name, gradient in gradients.items():
            outputs[name][chunk.rows, :] = gradient.astype(outputs[name].dtype)
        after = grad_before
    keep_state(plan, {"state": after}, {"state": state}, outputs)


def _places(size):
    """The row's and the column's index, of a square matrix."""
    return tuple(lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))


def _levels(size):
    """For blocks of 1, 2, 4, … positions: the indices of a row's and a column's block.

    Also which entries are in the second block of a pair and the first of the same.
    """
    row, column = _places(size)
    for level in range(size.bit_length() - 1):
        # Pallas cannot divide integers where no TPU is present.
        left, right = row >> level, column >> level
        yield left, right, (left & 1 == 1) & (left - 1 == right)


def _inverses(matrices):
    """The inverses of `I + matrix`, of the parts of matrices below their diagonals.

    As `chunked.inverse_unit_lower`, one step of all matrices after the other.
    """
    row, column = _places(matrices[0].shape[0])
    inverses = [jnp.where(row == column, 1.0, 0.0)] * len(matrices)
    for level, (_, _, pairs) in enumerate(_levels(matrices[0].shape[0])):
        below = [jnp.where(pairs, matrix, 0.0) for matrix in matrices]
        if level:
            below = [_precise_dot(a, b) for a, b in zip(inverses, below, strict=True)]
            below = [_precise_dot(a, b) for a, b in zip(below, inverses, strict=True)]
        inverses = [a - b for a, b in zip(inverses, below, strict=True)]
    return inverses


def _parts(x):
    """A float32 matrix as a sum: the nearest bfloat16 numbers, and the rest."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    # By its bits: compilers remove a cast to bfloat16 and back.
    nearest = lax.bitcast_convert_type((bits + 0x8000) & -0x10000, jnp.float32)
    return nearest, x - nearest


def _precise_dot(a, b):
    """A product with twice the bits of bfloat16, to which a TPU rounds operands."""
    (a, rest_of_a), (b, rest_of_b) = _parts(a), _parts(b)
    return pallas_grid.dot(a, b) + (
        pallas_grid.dot(a, rest_of_b) + pallas_grid.dot(rest_of_a, b)
    )


def _exact_sums(chosen, x, contract=(1, 0)):
    """Sums of the rows of `x` that a matrix of booleans chooses, or of its columns."""
    chosen = jnp.where(chosen, 1.0, 0.0)
    first, rest = _parts(x)
    second, third = _parts(rest)
    return sum(
        pallas_grid.dot(chosen, part, contract) for part in (first, second, third)
    )


class _Decay:
    """The decays of a chunk, a number for each position.

    Attributes:
        from_start, to_end: Columns: the decay from the chunk's start up to and
            including a position, and from after it to the chunk's end.
        whole: The decay over the chunk, `(1, 1)`.
    """

    def __init__(self, plan, log_decay):
        self._plan = plan
        row, column = _places(plan.chunk)
        self._lower = row >= column
        later = jnp.where(row < column, log_decay, 0.0)
        # Sums over the positions after a key up to and including a query.
        change = _exact_sums(self._lower, later, (1, 1))
        self._factors = jnp.where(self._lower, jnp.exp(change), 0.0)
        before = jnp.where(self._lower, log_decay, 0.0)
        self.from_start = jnp.exp(along_rows(before))
        self.to_end = jnp.exp(along_rows(later))
        self.whole = jnp.exp(jnp.sum(log_decay, axis=1, keepdims=True))

    def products(self, lefts, key):
        """`Σ_i x[t]_i k[s]_i exp(Σ_{s < r ≤ t} g[r]_i)` for `s ≤ t` and each x."""
        return [dot(self._plan, x, key, (1, 1)) * self._factors for x in lefts]

    def pull(self, lefts, key, products, gradients):
        """Gradients of `lefts` and `key`, from those of `products`.

        The second product is read below its diagonal only.
        """
        row, column = _places(self._plan.chunk)
        grad_lefts, grad_key, self._change = [], 0.0, 0.0
        for x, product, gradient in zip(lefts, products, gradients, strict=True):
            if grad_lefts:
                gradient = jnp.where(row > column, gradient, 0.0)
            self._change += gradient * product
            gradient = gradient * self._factors
            grad_lefts.append(dot(self._plan, gradient, key))
            grad_key += dot(self._plan, gradient, x, (0, 0))
        return grad_lefts, grad_key

    def gradient(self, from_start, to_end, whole):
        """The gradient of the log decays, after `pull`.

        Args:
            from_start, to_end, whole: The gradients of logarithms of the attributes, of
                all features.
        """
        (of_keys,) = as_columns(jnp.sum(self._change, axis=0, keepdims=True))
        up_to = along_rows(self._change) + along_rows(from_start) - of_keys
        parts = jnp.where(self._lower, up_to, along_rows(to_end))
        return jnp.sum(parts, axis=0, keepdims=True) + along_rows(whole)


class _DecayByFeature:
    """As `_Decay`, with as many decays for each position as features.

    Blocks of 1, 2, 4, … positions are merged in pairs: between the two, keys decay to
    the end of the first block, and the other vectors from the start of the second.
    """

    def __init__(self, plan, log_decay):
        self._plan = plan
        row, column = _places(plan.chunk)
        # Which positions are summed up: to the chunk's bounds, and to those of blocks.
        self._sums = [column <= row, column > row]
        self._pairs = []
        for left, right, pairs in _levels(plan.chunk):
            towards = (left & 1 == 1) == (column <= row)
            self._sums.append((left == right) & towards)
            self._pairs.append(pairs)
        self.from_start, self.to_end, *self._factors = (
            jnp.exp(_exact_sums(x, log_decay)) for x in self._sums
        )
        self.whole = self.from_start[-1:]

    def products(self, lefts, key):
        row, column = _places(self._plan.chunk)
        products = [jnp.where(row == column, along_rows(x * key), 0.0) for x in lefts]
        for factor, pairs in zip(self._factors, self._pairs, strict=True):
            far_key = key * factor
            for i, x in enumerate(lefts):
                between = dot(self._plan, x * factor, far_key, (1, 1))
                products[i] = jnp.where(pairs, between, products[i])
        return products

    def pull(self, lefts, key, products, gradients):
        row, column = _places(self._plan.chunk)
        diagonal = jnp.where(row == column, gradients[0], 0.0)
        diagonal = along_rows(diagonal)
        grad_lefts = [diagonal * key, *(jnp.zeros_like(x) for x in lefts[1:])]
        grad_key, self._changes = diagonal * lefts[0], []
        for factor, pairs in zip(self._factors, self._pairs, strict=True):
            far_key, change, grad_far_key = key * factor, 0.0, 0.0
            for i, x in enumerate(lefts):
                gradient = jnp.where(pairs, gradients[i], 0.0)
                far = dot(self._plan, gradient, far_key)
                change += far * x
                grad_lefts[i] += far * factor
                grad_far_key += dot(self._plan, gradient, x * factor, (0, 0))
            change += grad_far_key * key
            grad_key += grad_far_key * factor
            self._changes.append(change * factor)
        return grad_lefts, grad_key

    def gradient(self, from_start, to_end, whole):
        changes = from_start, to_end, *self._changes
        parts = zip(self._sums, changes, strict=True)
        return whole + sum(
            dot(self._plan, jnp.where(chosen, 1.0, 0.0), change, (0, 0))
            for chosen, change in parts
        )
