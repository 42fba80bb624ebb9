"""Causal linear attention in Triton kernels: a PyTorch operation with its gradient.

The operation and its gradient are opaque to `torch.compile`, which knows their shapes
and does not break the graph. The backward pass stores the inputs, the output and one
number per query, and recomputes features and states.
"""

import dataclasses
import functools
from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from keras_efficient_attn.ops.common.derivatives_torch import (
    refuse_second_derivatives,
)
from keras_efficient_attn.ops.common.feature_kernels.triton_kernels import (
    ACCUMULATED,
    Ends,
    Plan,
    Side,
    States,
    accumulate,
    find_gradients,
    find_maxima,
    read_states,
    sum_segments,
    weigh_gradients,
)
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO

# Positions per chunk. A segment is one or several chunks: shorter segments need fewer
# operations and more memory for states.
CHUNK = 64
# Maximum floats of states per position, unless a segment has the maximum number of
# chunks.
STATE_FLOATS = 256
MOST_CHUNKS = 8
# Columns per block. The smaller one is for projected features and for float32 products,
# whose operands fill the registers, for sums, and for GPUs with little shared memory.
BLOCK = 128
SMALL_BLOCK = 64
# Positions per tile of float32 products, where the tensor cores read registers.
SMALL_TILE = 32
# Bytes of shared memory that large blocks, and loads ahead of their use, may take; and
# of GPUs whose tensor cores read shared memory (compute capability 9 and 10).
LARGE_MEMORY = 160 * 1024
LARGEST_MEMORY = 200 * 1024
INTERPRETED = isinstance(read_states, InterpretedFunction)


@torch.library.custom_op("keras_efficient_attn::linear_attention", mutates_args=())
def linear_attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor | None,
    log_weight: Tensor | None,
    state: Tensor | None,
    log_scale: Tensor | None,
    options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Causal linear attention.

    Args:
        query, key, value: `(batch, length, heads, dim)`.
        rows: As for `Entrywise`, without gradient.
        log_weight: `(batch, heads, length)`, float32, `LOG_ZERO` for hidden keys.
            Needed next to a state.
        state: `(batch, heads, features * (value_dim + 1))`, the sum and the normalizer.
        log_scale: `(batch, heads)`.
        options: Strings: the `entry` of `Entrywise`, and `"normalized"` or
            `"partial"`.

    Returns:
        `(output, totals, scale, state, log_scale)`. With `"partial"`, the output is
        float32, with totals and log scales `(batch, heads, length)`. With
        `"normalized"` the totals are their reciprocals. Without an input state, the
        last tensors are also the state after all keys.
    """
    call = _Call(query, key, value, rows, log_weight, log_scale, options)
    states, final = call.states(state)
    dtype = value.dtype if call.plan.normalize else torch.float32
    output = torch.empty(
        (*query.shape[:3], value.shape[-1]), dtype=dtype, device=query.device
    )
    totals = call.row(query)
    call.read(states, output, totals, keys=False)
    return output, totals, call.scale(), final, call.last_log_scale.clone()


@linear_attention_op.register_fake
def _(query, key, value, rows, log_weight, state, log_scale, options):
    batch, length, heads, dim = query.shape
    features, value_dim = dim if rows is None else rows.shape[0], value.shape[-1]
    dtype = value.dtype if "normalized" in options.split() else torch.float32
    output = query.new_empty((batch, length, heads, value_dim), dtype=dtype)
    row = query.new_empty((batch, heads, length), dtype=torch.float32)
    final = row.new_empty((batch, heads, features * (value_dim + 1)))
    return output, row, torch.empty_like(row), final, row.new_empty((batch, heads))


@torch.library.custom_op("keras_efficient_attn::linear_attention_grad", mutates_args=())
def linear_attention_grad_op(
    gradients: Sequence[Tensor],
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    optional: Sequence[Tensor | None],
    options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradient of `linear_attention_op`.

    Args:
        gradients: Gradients of the output, the totals and the state.
        outputs: The output and the totals.
        inputs: Query, key and value.
        optional: The other tensors, in the order of `linear_attention_op`.
        options: As `linear_attention_op`.

    Returns:
        Gradients of the query, the key, the value, the log weights and the state.
    """
    query, key, value = inputs
    rows, log_weight, state, log_scale = optional
    call = _Call(query, key, value, rows, log_weight, log_scale, options)
    call.differentiate(gradients, outputs)
    states, _ = call.states(state)
    grad_states, grad_state = call.grad_states(gradients[2])
    grad_query, grad_key, grad_value = map(torch.empty_like, call.inputs)
    call.find_gradients(states, grad_query, keys=False)
    has_log = log_weight is not None
    grad_log_weight = call.find_gradients(grad_states, grad_key, True, has_log)
    if not has_log:
        grad_log_weight = call.row(key).zero_()
    call.read(grad_states, grad_value, None, keys=True)
    return grad_query, grad_key, grad_value, grad_log_weight, grad_state


@linear_attention_grad_op.register_fake
def _(gradients, outputs, inputs, optional, options):
    query, key, value = inputs
    grads = [x.new_empty(x.shape) for x in inputs]
    batch, length, heads, _ = key.shape
    grad_log_weight = key.new_empty((batch, heads, length), dtype=torch.float32)
    return *grads, grad_log_weight, torch.empty_like(gradients[2])


def _keep_for_backward(ctx, inputs, output):
    *tensors, ctx.options = inputs
    ctx.save_for_backward(*tensors, *output[:2])


def _differentiate(ctx, grad_output, grad_totals, _, grad_state, __):
    refuse_second_derivatives()
    *tensors, output, totals = ctx.saved_tensors
    gradients = linear_attention_grad_op(
        [grad_output, grad_totals, grad_state],
        [output, totals],
        tensors[:3],
        tensors[3:],
        ctx.options,
    )
    *grads, grad_log_weight, grad_state = gradients
    if tensors[4] is None:
        grad_log_weight = None
    if tensors[5] is None:
        grad_state = None
    return *grads, None, grad_log_weight, grad_state, None, None


linear_attention_op.register_autograd(_differentiate, setup_context=_keep_for_backward)


class _Call:
    """The sides of a call for the kernels, and the kernel launches.

    Attributes:
        inputs: Query, key and value, contiguous.
        plan: `Plan`.
        launch: Compiler options.
        queries, keys: `Side`s.
        last_log_scale: `(batch, heads)`: the log scale of the state after all keys.
    """

    def __init__(self, query, key, value, rows, log_weight, log_scale, options):
        entry, output = options.split()
        self.inputs = tuple(x.contiguous() for x in (query, key, value))
        query, key, value = self.inputs
        dim, value_dim = query.shape[-1], value.shape[-1]
        features = dim if rows is None else rows.shape[0]
        wide, rounded = (value.dtype == x for x in (torch.float32, torch.bfloat16))
        if rows is not None:
            rows = rows.float().contiguous()
            if rounded and query.dtype == key.dtype == torch.bfloat16:
                high = rows.bfloat16()
                rows = torch.stack([high, (rows - high).bfloat16()])
        memory = _shared_memory(query.device)
        reads_memory = memory >= LARGEST_MEMORY
        tile = SMALL_TILE if wide and not reads_memory else CHUNK
        large = memory >= LARGE_MEMORY and rounded and rows is None
        most = BLOCK if large else SMALL_BLOCK
        self.plan = Plan(
            entry=entry,
            dim=dim,
            features=features,
            value_dim=value_dim,
            normalize=output == "normalized",
            span=_chunks(features, value_dim) * (CHUNK // tile),
            tile=tile,
            block_dim=_block(dim, most),
            block_features=_block(features, most),
            block_values=_block(value_dim, most),
            rounded=rounded,
            # As precise for float16, with the range of float32.
            precision="tf32x3" if wide else "tf32",
            interpreted=INTERPRETED,
        )
        self.launch = {
            "num_warps": 4 if reads_memory else 8,
            "num_stages": 2 if memory >= LARGE_MEMORY and not wide else 1,
        }
        sides = (query, None), (key, value)
        self.queries, self.keys = (
            Side(x, rows, vectors, None, None, None, None, x.shape[1], x.shape[2])
            for x, vectors in sides
        )
        if log_weight is not None:
            self.keys = self.keys._replace(log=log_weight.contiguous())
        if entry == "exp":
            self.queries = self._with_maxima(self.queries)
            self.keys = self._with_maxima(self.keys)
        self._factors = None
        self.last_log_scale = self.row(query)[..., 0].zero_()
        if self.keys.log is not None:
            self._weigh(log_scale)

    def row(self, x):
        batch, length, heads, _ = x.shape
        shape = batch, heads, length
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    def _with_maxima(self, side):
        maxima = self.row(side.x)
        with torch.cuda.device_of(side.x):
            find_maxima[(self._tiles(side),)](side, maxima, self.plan, **self.launch)
        side = side._replace(maxima=maxima)
        if side.vectors is None:
            return side
        log = maxima
        if side.log is not None:
            log = torch.where(side.log > LOG_ZERO, side.log + maxima, LOG_ZERO)
        return side._replace(log=log)

    def _weigh(self, log_scale):
        """The running maxima for queries, and between segments."""
        log = self.keys.log
        if log_scale is None:
            log_scale = torch.full_like(log[..., 0], LOG_ZERO)
        maxima = torch.cat([log_scale[..., None], log], -1).cummax(-1).values
        size = self.plan.tile * self.plan.span
        length = log.shape[-1]
        ends = torch.arange(triton.cdiv(length, size) + 1, device=log.device) * size
        between = maxima[..., ends.clamp_(max=length)]
        segments = torch.arange(length, device=log.device) // size
        running = maxima[..., 1:].contiguous()
        self.queries = self.queries._replace(
            log=running, far=(between[..., segments] - running).exp_()
        )
        far = (log - between[..., segments + 1]).exp_()
        self.keys = self.keys._replace(far=far)
        self._factors = (between[..., :-1] - between[..., 1:]).exp_()
        self.last_log_scale = maxima[..., -1]

    def scale(self):
        """The log scales of values and totals."""
        scale = self.queries.log
        if scale is None:
            scale = self.row(self.queries.x).zero_()
        if self.queries.maxima is not None:
            scale = scale + self.queries.maxima
        return scale.clone(memory_format=torch.contiguous_format)

    def states(self, first=None):
        """States before each segment, and the state after the last."""
        return self._accumulate(self.keys, first, keys=True)

    def grad_states(self, last):
        """The gradients of the states and of the first state."""
        return self._accumulate(self.queries, last, keys=False)

    def differentiate(self, gradients, outputs):
        """Sets the gradients of undivided values and totals on the queries."""
        (grad, grad_totals, _), (output, totals) = gradients, outputs
        dtype = torch.bfloat16 if self.plan.rounded else torch.float32
        if self.plan.normalize:
            tensors = [x.contiguous() for x in (grad, output, totals)]
            grad, bias = torch.empty_like(tensors[0], dtype=dtype), self.row(grad)
            side = self.queries._replace(log=None)
            with torch.cuda.device_of(grad):
                weigh_gradients[(self._tiles(side),)](
                    side, *tensors, grad, bias, self.plan, **self.launch
                )
        else:
            grad, bias = grad.to(dtype).contiguous(), grad_totals.contiguous()
        self.queries = self.queries._replace(vectors=grad, bias=bias)

    def _accumulate(self, side, given, keys):
        """Cumulative sums over segments: `(States, last)`."""
        plan = self.plan
        batch, length, heads, _ = side.x.shape
        segments = triton.cdiv(length, plan.tile * plan.span)
        states = self._new_states(batch * heads, segments + 1)
        self._sum_segments(side, segments, states, keys)
        first = None if given is None else given.float().contiguous()
        shape = batch, heads, plan.features * (plan.value_dim + 1)
        last = side.x.new_empty(shape, dtype=torch.float32)
        blocks = sum(
            triton.cdiv(plan.features * width, ACCUMULATED.value)
            for width in (plan.value_dim, 1)
        )
        with torch.cuda.device_of(side.x):
            accumulate[(batch * heads, blocks)](
                states, Ends(first, last, self._factors), plan, not keys
            )
        return states, last

    def _new_states(self, heads, slots):
        plan = self.plan
        # Products round the sums.
        dtype = torch.bfloat16 if plan.rounded else torch.float32
        shape = heads, slots, plan.features
        new = self.queries.x.new_empty
        return States(
            new((*shape, plan.value_dim), dtype=dtype),
            new(shape, dtype=torch.float32),
            slots,
        )

    def _sum_segments(self, side, segments, states, keys):
        blocks = self.plan.block_features, self.plan.block_values
        features, values = (min(block, SMALL_BLOCK) for block in blocks)
        plan = dataclasses.replace(
            self.plan, block_features=features, block_values=values
        )
        grid = (
            states.sums.shape[0] * segments,
            triton.cdiv(plan.features, features),
            triton.cdiv(plan.value_dim, values),
        )
        with torch.cuda.device_of(side.x):
            sum_segments[grid](side, states, plan, keys, **self.launch)

    def read(self, states, output, totals, keys):
        blocks = triton.cdiv(self.plan.value_dim, self.plan.block_values)
        tensors = states, output, totals
        self._run(read_states, blocks, tensors, keys, self.launch)

    def find_gradients(self, states, output, keys, of_log_weights=False):
        """Writes the gradients of `x`; returns those of log weights, or `None`."""
        own = self._sides(keys)[0]
        plan, launch, grad_log = self.plan, self.launch, None
        block = plan.block_features if own.rows is None else plan.block_dim
        blocks = triton.cdiv(plan.dim, block)
        if of_log_weights:
            grad_log = self.row(own.x).repeat(blocks, 1, 1, 1)
        if of_log_weights and own.rows is not None:
            # The registers do not suffice for loads ahead of their use.
            launch = {**launch, "num_stages": 1}
        tensors = states, output, grad_log
        self._run(find_gradients, blocks, tensors, keys, launch)
        if not of_log_weights:
            return None
        return grad_log[0] if own.rows is not None else grad_log.sum(0)

    def _run(self, kernel, blocks, tensors, keys, launch):
        """Runs a kernel on all tiles of one side, in blocks of the output's columns.

        Args:
            kernel: Takes both sides and `(states, output, rows)`.
            blocks: Number of blocks.
            tensors: `(states, output, rows)`.
            keys: Whether the tiles are of keys.
            launch: Compiler options.
        """
        own, other = self._sides(keys)
        with torch.cuda.device_of(own.x):
            kernel[(self._tiles(own), blocks)](
                own, other, *tensors, self.plan, keys, **launch
            )

    def _sides(self, keys):
        sides = self.queries, self.keys
        return sides[::-1] if keys else sides

    def _tiles(self, side):
        """Tiles of all heads."""
        heads = side.x.shape[0] * side.heads
        return heads * triton.cdiv(side.length, self.plan.tile)


@functools.cache
def _shared_memory(device):
    """Bytes that a program may use."""
    if device.type != "cuda":
        return LARGEST_MEMORY
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def _chunks(features, value_dim):
    """Chunks in a segment, a power of two."""
    chunks = triton.cdiv(features * (value_dim + 1), CHUNK * STATE_FLOATS)
    return min(MOST_CHUNKS, triton.next_power_of_2(chunks))


def _block(size, most):
    return min(most, max(16, triton.next_power_of_2(size)))
