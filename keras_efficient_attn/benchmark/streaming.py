"""Reads a sequence in segments, with a layer's or a model's state."""

from keras import ops

# Positions per segment: the scores of a whole sequence would be large.
SEGMENT = 256


def read(step, inputs, state):
    """The state after a sequence, read in segments.

    Args:
        step: `(x, state) -> (output, state)`, for `x` of any length.
        inputs: `(batch, length, ...)`.
        state: Dict (or nesting) of tensors.
    """
    whole, rest = divmod(inputs.shape[1], SEGMENT)

    def body(index, state):
        return step(_segment(inputs, index * SEGMENT, SEGMENT), state)[1]

    # JAX traces the body of a loop even if it never runs.
    if whole:
        state = ops.fori_loop(0, whole, body, state)
    if rest:
        _, state = step(_segment(inputs, whole * SEGMENT, rest), state)
    return state


def generate(step, inputs, state):
    """Generates one position at a time: the sum of outputs, and the last state.

    The loop is the backend's own, compiled where the backend compiles.

    Args:
        step: `(x, state) -> (output, state)`, for `x` of one position.
        inputs: `(batch, steps, ...)`.
        state: Dict (or nesting) of tensors.

    Returns:
        `(total, state)`.
    """

    def body(index, carry):
        total, state = carry
        output, state = step(_segment(inputs, index, 1), state)
        return total + output, state

    first = step(_segment(inputs, 0, 1), state)
    return ops.fori_loop(1, inputs.shape[1], body, first)


def _segment(inputs, start, length):
    batch, _, *others = inputs.shape
    starts = (0, start) + (0,) * len(others)
    return ops.slice(inputs, starts, (batch, length, *others))
