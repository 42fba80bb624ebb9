"""The parts of the Pallas kernels of linear attention: plan and blocks.

Operands are those of `pallas_grid`: queries, keys, values and outputs are positions; a
state, and the gradient of a weight, a matrix for each head; a weight of the feature
maps, a matrix for all.

In a kernel, numbers per query or key are a column `(chunk, 1)` or a row `(1, chunk)`.
"""

import collections.abc
import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from keras_efficient_attn.ops.common import pallas_grid
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO

LANES = 128
STATE_NAMES = ("sum", "normalizer", "log_scale")
# The parts of the state that have gradients.
SUMS = ("sum", "normalizer")
ROW_NAMES = (
    "mask",
    "log_weight",
    "totals",
    "scale",
    "before",
    "factor",
    "grad_totals",
    "grad_scale",
)
POSITION_NAMES = ("query", "key", "value", "output")


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sizes and options of a call, as one static argument.

    Attributes:
        query_map, key_map: As `LinearAttentionConfig`, for blocks `(chunk, dim)`.
        output: `"normalized"`; `"values"`, without division and scale; or `"partial"`:
            values, totals and log scales.
        weighted: Whether keys have log weights, given or from their map.
        batch, heads, length: Sizes.
        features, value_dim: Sizes of the state.
        block: Positions per program.
        chunk: Positions per matrix of scores; divides `block`.
        operand: Dtype of the values and of matrix operands; products accumulate in
            float32.
    """

    query_map: collections.abc.Callable
    key_map: collections.abc.Callable
    output: str
    weighted: bool
    batch: int
    heads: int
    length: int
    features: int
    value_dim: int
    block: int
    chunk: int
    operand: str

    @property
    def blocks(self):
        return pl.cdiv(self.length, self.block)

    @property
    def chunks(self):
        """Number of chunks per block."""
        return self.block // self.chunk

    @property
    def is_ragged(self):
        """Whether the last block reaches beyond the length."""
        return self.length % self.block != 0

    def positions(self, dim, dtype):
        """The shape of an output with a vector for each position."""
        shape = self.batch, self.heads, self.length, dim
        return jax.ShapeDtypeStruct(shape, dtype)

    def row(self):
        shape = self.batch, self.heads, 1, self.length
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def outputs(self):
        """Shapes of the queries' outputs, by name; a partial output is float32."""
        dtype = "float32" if self.output == "partial" else self.operand
        outputs = {"output": self.positions(self.value_dim, dtype)}
        if self.output == "partial":
            outputs |= {"totals": self.row(), "scale": self.row()}
        return outputs

    def state(self, names=STATE_NAMES):
        """Shapes of parts of the state, by name."""
        sizes = {
            "sum": (self.features, self.value_dim),
            "normalizer": (1, self.features),
            "log_scale": (1, 1),
        }
        return {name: self.per_head(sizes[name]) for name in names}

    def per_head(self, size):
        shape = self.batch, self.heads, *size
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def weights(self, inputs):
        """Shapes of the gradients of the maps' weights, for each head."""
        return tuple(self.per_head(weight.shape) for weight in inputs["weights"])

    def scratch(self, names=STATE_NAMES):
        shapes = self.state(names)
        return {
            name: pltpu.VMEM(shape.shape[2:], jnp.float32)
            for name, shape in shapes.items()
        }


def from_row(x):
    """Rows as `(batch, length, heads)`."""
    return jnp.swapaxes(x[:, :, 0], 1, 2)


def call(plan, kernel, inputs, outputs, scratch, backwards=False):
    """Runs a kernel over all blocks of all heads, the last block first if `backwards`.

    Args:
        plan: `Plan`.
        kernel: As for `pallas_grid.call`.
        inputs, outputs: Dicts by name, of arrays and of their shapes.
        scratch: Dict.
    """

    def at(i):
        return plan.blocks - 1 - i if backwards else i

    def spec(name, x):
        if name in POSITION_NAMES:
            return pallas_grid.positions(x, plan.block, at)
        if name in ROW_NAMES:
            return pallas_grid.row(x, plan.block, at)
        return jax.tree.map(pallas_grid.whole, x)

    specs = [
        {name: spec(name, x) for name, x in tensors.items()}
        for tensors in (inputs, outputs)
    ]
    return pallas_grid.call(plan, kernel, inputs, outputs, specs, scratch)


def dot(plan, a, b, contract=(1, 0)):
    """A product of matrices, of the plan's operands."""
    return pallas_grid.dot(a.astype(plan.operand), b.astype(plan.operand), contract)


def as_rows(*columns):
    """Columns `(n, 1)` as rows `(1, n)`, by one transpose."""
    if not columns:
        return ()
    matrix = _side_by_side(columns, axis=1).T
    return tuple(matrix[i : i + 1] for i in range(len(columns)))


def as_columns(*rows):
    """Rows `(1, n)` as columns `(n, 1)`, by one transpose."""
    if not rows:
        return ()
    matrix = _side_by_side(rows, axis=0).T
    return tuple(matrix[:, i : i + 1] for i in range(len(rows)))


def _side_by_side(parts, axis):
    """Columns or rows, padded to a matrix with `LANES` of them."""
    shape = list(parts[0].shape)
    shape[axis] = LANES
    place = lax.broadcasted_iota(jnp.int32, shape, axis)
    matrix = jnp.broadcast_to(parts[-1], shape)
    for index in reversed(range(len(parts) - 1)):
        matrix = jnp.where(place == index, parts[index], matrix)
    return matrix


def upper_triangle(size):
    """Boolean `(size, size)`: whether the row is no larger than the column."""
    rows = lax.broadcasted_iota(jnp.int32, (size, size), 0)
    return rows <= lax.broadcasted_iota(jnp.int32, (size, size), 1)


def lower_triangle(size):
    """Boolean `(size, size)`: whether the row is no smaller than the column."""
    rows = lax.broadcasted_iota(jnp.int32, (size, size), 0)
    return rows >= lax.broadcasted_iota(jnp.int32, (size, size), 1)


def along_rows(x):
    """The row sums, as a column."""
    return jnp.sum(x, axis=1, keepdims=True)


def values_of(inputs):
    """Inputs of a function whose `defvjp` has `symbolic_zeros`, and what is trained.

    Returns:
        The arrays, and `()` if the gradient of a weight is requested, or `None`.
    """
    trained = any(weight.perturbed for weight in inputs["weights"])
    arrays = jax.tree.map(
        lambda x: x.value, inputs, is_leaf=lambda x: isinstance(x, CustomVJPPrimal)
    )
    return arrays, () if trained else None


def gradients_of(inputs, *results):
    """The gradients of the inputs, from the outputs of the gradient kernels.

    Those of weights are summed over all heads and kernels; inputs without have zeros.
    """
    gradients = jax.tree.map(jnp.zeros_like, inputs)
    for result in results:
        gradients |= {name: x for name, x in result.items() if name in inputs}
    same = zip(*(result["weights"] for result in results), strict=True)
    weights = tuple(sum(x.sum((0, 1)) for x in several) for several in same)
    gradients["weights"] = weights or jax.tree.map(jnp.zeros_like, inputs["weights"])
    return (gradients,)


def with_output_gradients(plan, inputs, gradients):
    """The inputs of a gradient kernel of queries: also the outputs' gradients."""
    gradients = {name: materialize(x) for name, x in gradients.items()}
    given = {**inputs, "output": gradients["output"]}
    if plan.output == "partial":
        given["grad_totals"] = gradients["totals"]
        given["grad_scale"] = gradients["scale"]
    return given


def materialize(x):
    """A gradient as an array, including JAX's symbolic zeros."""
    if isinstance(x, SymbolicZero):
        return jnp.zeros(x.aval.shape, x.aval.dtype)
    return x


def mask_or_zero(kept, x, otherwise=0.0):
    """`x` where `kept`, else `otherwise`; all of `x` if `kept` is `None`."""
    return x if kept is None else jnp.where(kept, x, otherwise)


def start(inputs, scratch, weights=()):
    """Initialises the state in a head's first program: given, or empty.

    Args:
        inputs, scratch: References by name.
        weights: References of gradients that programs accumulate.
    """

    @pl.when(pl.program_id(2) == 0)
    def _():
        for name, ref in scratch.items():
            if name in inputs:
                ref[...] = inputs[name][...]
            else:
                ref[...] = jnp.full_like(ref, LOG_ZERO if name == "log_scale" else 0.0)
        for ref in weights:
            ref[...] = jnp.zeros_like(ref)


def add_keys(plan, state, key, log_weight, value):
    """The state after a chunk's keys, by name, from the state before it."""
    sums, normalizer, log_scale = (state[name] for name in STATE_NAMES)
    if plan.weighted:
        after = jnp.maximum(log_scale, jnp.max(log_weight, axis=0, keepdims=True))
        key = key * jnp.exp(log_weight - after)
        kept, log_scale = jnp.exp(log_scale - after), after
        sums, normalizer = sums * kept, normalizer * kept
    return {
        "sum": sums + dot(plan, key, value, (0, 0)),
        "normalizer": normalizer + jnp.sum(key, axis=0, keepdims=True),
        "log_scale": log_scale,
    }


def keep_state(plan, state, scratch, outputs):
    """Keeps the state, or its gradient, for the next program; the last one returns it.

    Args:
        plan: `Plan`.
        state: Values by name.
        scratch, outputs: References by name; there may be no outputs for the state.
    """
    for name, ref in scratch.items():
        ref[...] = state[name]
    if not scratch.keys() <= outputs.keys():
        return

    @pl.when(pl.program_id(2) == plan.blocks - 1)
    def _():
        for name in scratch:
            outputs[name][...] = state[name]


def add_to(references, gradients):
    for ref, gradient in zip(references, gradients, strict=False):
        ref[...] += gradient


def given_columns(plan, inputs):
    """The given log weights or mask of each chunk's keys, if any."""
    for name in ("log_weight", "mask"):
        if name in inputs:
            starts = range(0, plan.block, plan.chunk)
            # At most one matrix row per chunk: a single transpose.
            return as_columns(*(inputs[name][:, pl.ds(i, plan.chunk)] for i in starts))
    return ()


class Chunk:
    """A chunk of a block: its masked inputs, with the features of its keys.

    Args:
        plan: `Plan`.
        inputs: The references, by name.
        block: Index of the block.
        index: Index of the chunk in the block, an int.
        given: From `given_columns`.

    Attributes:
        rows: The chunk's slice of the block.
        exists: Column, whether the position is in the sequence; `None` for all.
        kept: Column, whether the key is to be seen; `None`: all are.
    """

    def __init__(self, plan, inputs, block, index, given):
        self.plan, self.inputs = plan, inputs
        self.rows = pl.ds(index * plan.chunk, plan.chunk)
        self.start = block * plan.block + index * plan.chunk
        self.exists = self.exists_row = self.kept = None
        if plan.is_ragged:
            self.exists = self._places((plan.chunk, 1), 0) < plan.length
            self.exists_row = self._places((1, plan.chunk), 1) < plan.length
            self.kept = self.exists
        self.given_weight = None
        if "log_weight" in inputs:
            self.given_weight = given[index]
            self._keep(self.given_weight > LOG_ZERO)
        elif "mask" in inputs:
            self._keep(given[index] > 0.0)

    def _places(self, shape, axis):
        return self.start + lax.broadcasted_iota(jnp.int32, shape, axis)

    def _keep(self, kept):
        self.kept = kept if self.kept is None else self.kept & kept

    def row(self, name):
        """A row written by an earlier kernel, 0 beyond the sequence."""
        return mask_or_zero(self.exists_row, self.inputs[name][:, self.rows])

    def first(self, name, otherwise):
        """The first entry of a row, `(1, 1)`; `otherwise` in a chunk of padding."""
        x = self.inputs[name][:, self.rows][:, :1]
        return jnp.where(self.start < self.plan.length, x, otherwise)

    def load(self, name, kept):
        x = self.inputs[name][self.rows, :]
        if kept is None:
            return x
        return jnp.where(kept, x.astype(jnp.float32), 0.0)

    def value(self):
        return self.load("value", self.kept)

    def weights(self):
        return tuple(ref[...] for ref in self.inputs["weights"])

    def query_features(self):
        """`(features, log_scale)`: `(chunk, features)`, and a column or `None`."""
        query = self.load("query", self.exists).astype(jnp.float32)
        (features, log_scale), self._pull_query = jax.vjp(
            self.plan.query_map, query, *self.weights()
        )
        self._query_log_scale = log_scale
        return features, None if log_scale is None else log_scale[:, None]

    def write(self, reference, x):
        reference[self.rows, :] = x.astype(reference.dtype)

    def write_query_gradient(self, outputs, grad_features, grad_log_scale=None):
        """Writes the gradients of queries, and adds those of the map's weights."""
        grad_log_scale = _like(self._query_log_scale, grad_log_scale)
        grad_query, *grad_weights = self._pull_query((grad_features, grad_log_scale))
        self.write(outputs["query"], grad_query)
        add_to(outputs["weights"], grad_weights)

    def key_features(self):
        """`(features, log_weight)`: `(chunk, features)`, and a column or `None`."""
        key = self.load("key", self.kept).astype(jnp.float32)
        (features, log_scale), self._pull_key = jax.vjp(
            self.plan.key_map, key, *self.weights()
        )
        self._key_log_scale = log_scale
        log_weight = self.given_weight
        if log_scale is not None:
            log_scale = log_scale[:, None]
            log_weight = log_scale if log_weight is None else log_weight + log_scale
        if self.plan.weighted:
            if log_weight is None:
                # With a state, which may have another scale.
                log_weight = jnp.zeros((self.plan.chunk, 1), jnp.float32)
            log_weight = mask_or_zero(self.kept, log_weight, LOG_ZERO)
        return mask_or_zero(self.kept, features), log_weight

    def write_key_gradient(self, outputs, grad_features, grad_log_weight):
        """Writes gradients of kept keys and log weights, and adds those of weights."""
        grad_features = mask_or_zero(self.kept, grad_features)
        if grad_log_weight is not None:
            grad_log_weight = mask_or_zero(self.kept, grad_log_weight)
        grad_log_scale = _like(self._key_log_scale, grad_log_weight)
        grad_key, *grad_weights = self._pull_key((grad_features, grad_log_scale))
        self.write(outputs["key"], grad_key)
        add_to(outputs["weights"], grad_weights)
        if "log_weight" in outputs:
            (outputs["log_weight"][:, self.rows],) = as_rows(grad_log_weight)

    def write_value_gradient(self, outputs, grad_value):
        """Writes the gradients of the values of kept keys."""
        self.write(outputs["value"], mask_or_zero(self.kept, grad_value))


def _like(log_scale, gradient):
    """The gradient of a log scale `(chunk,)` or `None`, from a column or `None`."""
    if log_scale is None:
        return None
    return jnp.zeros_like(log_scale) if gradient is None else gradient[:, 0]
