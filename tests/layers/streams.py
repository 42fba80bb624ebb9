"""Sequences that an attention layer reads in pieces."""

from tests.ops.pieces import read_in_pieces


def stream(layer, x, sizes, max_length=None, **masks):
    """The causal outputs of pieces of `x`, joined, and the last state.

    Args:
        layer: A built layer.
        x: `(batch, length, dim)`, queries and values.
        sizes: Lengths of the pieces.
        max_length: For a state that grows.
        masks: Arguments of the call, `(batch, length)`.
    """

    def attend(x, *rest):
        *pieces, state = rest
        options = dict(zip(masks, pieces, strict=True))
        return layer(x, x, use_causal_mask=True, state=state, **options)

    state = layer.get_initial_state(len(x), max_length)
    return read_in_pieces(attend, state, [x, *masks.values()], sizes)
