"""Attention within the buckets of a locality-sensitive hash."""

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.checks import check_implementation, may_agree
from keras_efficient_attn.ops.common.inputs import boolean_mask, hide_masked
from keras_efficient_attn.ops.common.numerics import accumulator_dtype
from keras_efficient_attn.ops.common.plan import jit_on_jax, symbolic
from keras_efficient_attn.ops.common.state import check_state
from keras_efficient_attn.ops.lsh_attention.chunked import chunked_lsh_attention
from keras_efficient_attn.ops.lsh_attention.layout import LSHConfig
from keras_efficient_attn.ops.lsh_attention.pairs import (
    pairs_lsh_attention,
    prefers_pairs,
)
from keras_efficient_attn.ops.lsh_attention.reference import reference_lsh_attention
from keras_efficient_attn.ops.lsh_attention.streaming import (
    lsh_attention_state_spec,
    streamed_lsh_attention,
)


@symbolic
def lsh_attention(
    query,
    value,
    buckets,
    *,
    num_buckets,
    chunk_size,
    causal: bool = False,
    aligned: bool = False,
    across_buckets: bool = False,
    key_mask=None,
    state=None,
    documents=None,
    scale: float = 1.0,
    dropout_mask=None,
    implementation: str | None = None,
):
    """Softmax self-attention within hash buckets.

    ```
    key[s] = query[s] / √(‖query[s]‖² + dim / 1000)
    w[t, s] = exp(scale · query[t] · key[s])    if t sees s in any round, s ≠ t
    ```

    divided by the sum of the weights; a position that sees no other position gets its
    own value. Each round sorts positions by bucket, and by position within a bucket,
    and cuts them into chunks. A position sees the positions of its bucket in its own
    chunk and the previous chunk. A key seen in several rounds counts once.

    Args:
        query: `(batch, length, heads, dim)`.
        value: `(batch, length, heads, value_dim)`.
        buckets: Integers `(batch, heads, rounds, length)`, below `num_buckets`.
        num_buckets: Number of buckets.
        chunk_size: Positions per chunk.
        causal: Whether position `t` sees `0..t` only. Defaults to `False`.
        aligned: Whether each bucket starts a new chunk. This takes up to `length +
            num_buckets · chunk_size` slots instead of `length`, and no position's chunk
            depends on later positions. Defaults to `False`: chunks cross bucket
            boundaries.
        across_buckets: Whether positions also see other buckets in both chunks; the
            last chunk then precedes the first. Excludes `aligned`. Defaults to `False`.
        key_mask: Optional boolean `(batch, length)`: hidden positions are in no chunk,
            see nothing, and give zeros.
        state: Optional state, from `lsh_attention_state` or the previous segment's
            call. Needs `causal` and `aligned`.
        documents: Optional `Documents` of rows of a known length, without `state` and
            `dropout_mask`: each has the outputs that it has in a row of its own, from
            all pairs of positions.
        scale: Factor of the logits. Defaults to 1.
        dropout_mask: Optional factors of the weights, `(batch, heads, rounds,
            chunk_size, 2 · chunk_size)`, the same for all chunks.
        implementation: `"chunked"`, the only one with state and dropout; `"pairs"`, all
            pairs of positions, for a length that is known when a graph is traced; or
            `"reference"`, the definition. Defaults to `None`: pairs while they take
            less time (on a CPU with 4 rounds, 32 buckets and chunks of 64, causal, up
            to 2,048 positions, on TensorFlow 3,072; with `aligned`, 2,797 and 3,882)
            and, but for PyTorch's kernel on CPUs, while `batch · heads · length²` is at
            most 2²⁷ on a CPU; otherwise chunks.

    Returns:
        `(output, state)`: `(batch, length, heads, value_dim)` in the accumulator's
        dtype, and the new state or `None`.

    Raises:
        ValueError: If shapes do not agree; if a `state` is given without `causal` and
            `aligned`, or has other sizes; for `documents` with arguments that do not go
            with them; for sizes that are not positive integers, for
            an unknown implementation, or one that cannot run; or for more positions and
            buckets than the sort can hold.

    Reference:
        - [Kitaev et al., 2020](https://arxiv.org/abs/2001.04451)
    """
    query, value = map(ops.convert_to_tensor, (query, value))
    # Narrow integers would overflow in the keys of the sort.
    buckets, key_mask = ops.cast(buckets, "int32"), boolean_mask(key_mask)
    config = LSHConfig(num_buckets, chunk_size, causal, aligned, across_buckets, scale)
    _check_shapes(query, value, buckets, key_mask, dropout_mask, chunk_size)
    if isinstance(query.shape[1], int):
        config.check_length(query.shape[1])
    if state is not None and not (causal and aligned):
        raise ValueError(
            "`state` needs causal=True and aligned=True. Received: "
            f"causal={causal}, aligned={aligned}"
        )
    check_implementation(
        implementation,
        "chunked",
        "pairs",
        limited=("pairs",),
        state=state,
        dropout_mask=dropout_mask,
    )
    if documents is not None:
        excluded = {"state": state, "dropout_mask": dropout_mask}
        given = [name for name, tensor in excluded.items() if tensor is not None]
        if given or implementation not in (None, "pairs"):
            raise ValueError(
                "With `documents`, leave out `state` and `dropout_mask`, and pass "
                "implementation=None or 'pairs'. Received: "
                f"{', '.join(given) or f'{implementation=}'}"
            )
        implementation = "pairs"
    if implementation == "pairs" and not isinstance(query.shape[1], int):
        raise ValueError(
            "implementation='pairs' needs inputs of a fixed length. Received: "
            f"query.shape={tuple(query.shape)}"
        )
    if state is not None:
        sizes = (*buckets.shape[:3], num_buckets, chunk_size)
        sizes = (*sizes, query.shape[-1], value.shape[-1])
        check_state(state, lsh_attention_state_spec(*sizes, None))
    extras = (key_mask, documents, state, dropout_mask)
    return _attend(query, value, buckets, extras, config, implementation)


def _check_shapes(query, value, buckets, key_mask, dropout_mask, chunk_size):
    """Raises `ValueError` for shapes that do not agree."""
    queries, values = tuple(query.shape), tuple(value.shape)
    if len(queries) != 4 or not may_agree(queries[:3], values[:-1]):
        raise ValueError(
            "`query` and `value` must have the shape (batch, length, heads, dim), and "
            "agree in batch, length and heads. Received: "
            f"query.shape={queries}, value.shape={values}"
        )
    batch, length, heads, _ = queries
    rounds = buckets.shape[2] if len(buckets.shape) == 4 else None
    pairs = (chunk_size, 2 * chunk_size)
    for name, tensor, axes, shape in (
        ("buckets", buckets, "heads, rounds, length", (heads, rounds, length)),
        ("key_mask", key_mask, "length", (length,)),
        (
            "dropout_mask",
            dropout_mask,
            "heads, rounds, chunk_size, 2 · chunk_size",
            (heads, rounds, *pairs),
        ),
    ):
        if tensor is not None and not may_agree(tensor.shape, (batch, *shape)):
            raise ValueError(
                f"`{name}` must have the shape (batch, {axes}) = {(batch, *shape)}. "
                f"Received: {name}.shape={tuple(tensor.shape)}"
            )


@jit_on_jax("config", "implementation")
def _attend(query, value, buckets, extras, config, implementation):
    key_mask, documents, state, dropout_mask = extras
    dtype = accumulator_dtype(query, value)
    kept = ops.ones(shape_of(query)[:2], "bool") if key_mask is None else key_mask
    query, value = hide_masked(query, key_mask), hide_masked(value, key_mask)
    if dropout_mask is not None:
        dropout_mask = ops.cast(dropout_mask, dtype)
    wide = ops.cast(query, dtype), ops.cast(value, dtype)
    narrow = (query, value) if query.dtype == value.dtype else wide
    tensors = *wide, buckets, kept
    if state is not None:
        state = {name: ops.cast(tensor, dtype) for name, tensor in state.items()}
        return streamed_lsh_attention(*tensors, config, state, dropout_mask)
    if implementation == "reference":
        return reference_lsh_attention(*tensors, config), None
    if implementation is None and dropout_mask is None:
        takes_pairs = prefers_pairs(query, buckets.shape[2], config)
    else:
        takes_pairs = implementation == "pairs"
    if takes_pairs:
        return pairs_lsh_attention(*tensors, config, documents), None
    output = chunked_lsh_attention(*narrow, buckets, kept, config, dropout_mask)
    return output, None
