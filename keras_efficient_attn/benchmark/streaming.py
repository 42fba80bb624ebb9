"""Reading a sequence piece by piece, with the state of whatever reads it."""

from keras import ops

# Positions that are read at once: the scores of all of them would be large.
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

    # JAX traces the body of a loop that is never run, too.
    if whole:
        state = ops.fori_loop(0, whole, body, state)
    if rest:
        _, state = step(_segment(inputs, whole * SEGMENT, rest), state)
    return state


def generate(step, inputs, state):
    """Sum of the outputs of one position at a time, and the state after them.

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
