"""States of streaming operations, from their specifications."""

from keras import ops

from keras_efficient_attn.ops.common.checks import may_agree


def make_state(spec):
    """The tensors of a state.

    Args:
        spec: Dict of `(shape, dtype)`, for zeros, or `(shape, dtype, value)` with a
            value that broadcasts to the shape.
    """
    return {name: _fill(*entry) for name, entry in spec.items()}


def check_state(state, spec):
    """Raises `ValueError` for a state that `spec` does not describe.

    Args:
        state: Dict of tensors.
        spec: As for `make_state`, with `None` for arbitrary sizes.
    """
    expected = {name: entry[0] for name, entry in spec.items()}
    received = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if received.keys() != expected.keys() or not all(
        may_agree(received[name], shape) for name, shape in expected.items()
    ):
        raise ValueError(
            "`state` must be of the same options and sizes as the call, with the "
            f"shapes {expected}. Received: a state with the shapes {received}"
        )


def common_position(position):
    """The position `(batch,)` that all rows have; 0 for a batch without rows."""
    return ops.max(position, initial=0)


def _fill(shape, dtype, value=None):
    if value is None:
        return ops.zeros(shape, dtype)
    return ops.broadcast_to(ops.convert_to_tensor(value, dtype), shape)
