"""Attention to keys through their codes: chooses the form."""

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.vq_attention import by_kernel
from keras_efficient_attn.ops.vq_attention.cache import empty_cache
from keras_efficient_attn.ops.vq_attention.codebook import look_up
from keras_efficient_attn.ops.vq_attention.compressed import (
    causal_compressed_attention,
    full_compressed_attention,
)
from keras_efficient_attn.ops.vq_attention.expanded import (
    causal_expanded_attention,
    expanded_attention_in_a_block,
    full_expanded_attention,
)
from keras_efficient_attn.ops.vq_attention.tensors import each


def far_keys(keys, codebook, config):
    """The representation of keys beyond the window.

    The keys themselves for soft codes, their residuals with `order=2`; otherwise the
    `index` of their code says all.
    """
    if config.soft:
        return keys
    if config.order == 0:
        return keys._replace(key=None)
    return keys._replace(key=keys.key - look_up(codebook.codes, keys.index))


def attend_far(
    query, keys, codebook, config, causal=True, cache=None, kernel_dtype=None
):
    """Partial softmax over the keys' codes, and the cache after the last key.

    Args:
        query: `(batch, query_length, heads, dim)`.
        keys: `Keys` from `far_keys`.
        codebook: `Codebook`.
        config: `VQConfig`.
        causal: Whether query `t` sees keys `0..t` only.
        cache: The cache of earlier keys, or `None` for none.
        kernel_dtype: In which a kernel multiplies; `None` for no kernel.

    Returns:
        `(part, cache)`, for `online_softmax.merge`; the cache is `None` if none was
        given and none was needed.
    """
    in_a_block = cache is None and config.order == 2 and _fit(config, query, keys.key)
    is_simple = cache is None and config.order == 0 and causal
    kernel = None
    if is_simple:
        kernel = by_kernel.kernel_for(query, keys, codebook.codes, kernel_dtype)
    if cache is None and not in_a_block and kernel is None:
        batch, value_dim = shape_of(query)[0], shape_of(keys.value)[-1]
        cache = empty_cache(batch, codebook, value_dim, config, query.dtype)
    if not config.gradient_through_cache:
        keys, codebook, cache = (
            each(ops.stop_gradient, t) for t in (keys, codebook, cache or ())
        )
    if kernel is not None:
        tensors = query, keys, codebook.codes
        return by_kernel.causal_attention(kernel, *tensors, kernel_dtype), None
    if in_a_block:
        part = expanded_attention_in_a_block(query, keys, codebook, config, causal)
        return part, None
    if config.order == 2:
        attend = causal_expanded_attention if causal else full_expanded_attention
    else:
        attend = causal_compressed_attention if causal else full_compressed_attention
    return attend(query, keys, codebook, cache, config)


def _fit(config, query, key):
    """Whether queries and keys are known to fit in one block."""
    lengths = query.shape[1], key.shape[1]
    return all(isinstance(n, int) and 0 < n <= config.longest_in_pairs for n in lengths)
