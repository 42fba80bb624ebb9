"""States of operations that stream, from their descriptions."""

from keras import ops


def make_state(spec):
    """The tensors of a state.

    Args:
        spec: Dict of `(shape, dtype)`, for zeros, or `(shape, dtype, value)` with a
            value that broadcasts to the shape.
    """
    return {name: _filled(*entry) for name, entry in spec.items()}


def _filled(shape, dtype, value=None):
    if value is None:
        return ops.zeros(shape, dtype)
    return ops.broadcast_to(ops.convert_to_tensor(value, dtype), shape)
