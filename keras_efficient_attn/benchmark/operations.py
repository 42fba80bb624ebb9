"""Useful operations of a layer, as the layer counts them.

A multiplication and an addition are two operations. A layer counts those between its
projections (`EfficientAttention.operations`); the projections are counted here, with
`2 · dim · width` per position for each (query, key, value, output, and the gate if
any), where `width` is heads times head size. Products inside chunks, padding and
recomputation depend on the implementation and are not counted. A backward pass counts
twice the forward pass.
"""

BACKWARD = 2


def layer_operations(layer, batch, length, causal):
    """Useful operations of a forward pass, or `None` for a layer without a count.

    Args:
        layer: Built `EfficientAttention`.
        batch: Batch size.
        length: Positions.
        causal: Whether query `t` sees keys `0..t` only.

    Returns:
        Number of operations, or `None`.
    """
    core = layer.operations(length, causal)
    return None if core is None else batch * (length * _projections(layer) + core)


def decode_operations(layer, batch, length):
    """Useful operations of one more position after `length` others, or `None`."""
    before, after = (layer.operations(n, True) for n in (length, length + 1))
    if before is None or after is None:
        return None
    return batch * (_projections(layer) + after - before)


def _projections(layer):
    projections = [layer.query_dense, layer.value_dense, layer.output_dense]
    if layer.key_dense is not layer.query_dense:
        projections.append(layer.key_dense)
    if layer.gate_dense is not None:
        projections.append(layer.gate_dense)
    shapes = [projection.kernel.shape for projection in projections]
    return 2 * sum(shape[0] * shape[1] * shape[2] for shape in shapes)
