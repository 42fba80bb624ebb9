"""Gated attention units by name: the arguments of a backbone that make them."""

from keras_efficient_attn.ops.common.checks import check_positive_int


def gated_attention_units(attention, hidden_dim, key_dim=128):
    """Arguments of `EfficientTransformerBackbone` for blocks of gated attention units.

    ```
    u, v = silu(x W_u), silu(x W_v)         of width 2 · hidden_dim
    y = x + (attention(x W_q, x W_k, v) ⊙ u) W_o,   x normalised before
    ```

    One head of attention between two gated projections takes the place of attention
    with several heads and of the feed-forward network: there is none, and two units are
    about as large as a block with both.

    Args:
        attention: Name of an attention layer with options, such as `"vq:window=64"`.
        hidden_dim: Width of the model.
        key_dim: Width of queries and keys. Defaults to 128.

    Returns:
        Dict of `hidden_dim`, `intermediate_dim`, `num_heads`, `head_dim` and
        `attention`.

    Raises:
        TypeError: If `attention` is not a name.
        ValueError: If a size is not a positive integer.

    Example:

    >>> from keras_efficient_attn.models import (
    ...     EfficientTransformerBackbone,
    ...     gated_attention_units,
    ... )
    >>> units = gated_attention_units("local:window=8", hidden_dim=16, key_dim=4)
    >>> backbone = EfficientTransformerBackbone(256, num_layers=2, **units)

    Reference:
        - [Hua et al., 2022](https://arxiv.org/abs/2202.10447)
    """
    if not isinstance(attention, str):
        raise TypeError(
            "`attention` of gated attention units must be a name with options. "
            f"Received: attention={attention!r}"
        )
    check_positive_int("hidden_dim", hidden_dim)
    check_positive_int("key_dim", key_dim)
    separator = "," if ":" in attention else ":"
    options = (
        f"value_dim={2 * hidden_dim},use_gate=True,gate_activation=silu,"
        "value_activation=silu"
    )
    return {
        "hidden_dim": hidden_dim,
        "intermediate_dim": None,
        "num_heads": 1,
        "head_dim": key_dim,
        "attention": f"{attention}{separator}{options}",
    }
