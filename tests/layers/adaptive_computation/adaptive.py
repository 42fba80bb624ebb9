"""Adaptive computation time by its definition, in NumPy."""

import numpy as np


def definition(step, halting, state, running, max_steps, epsilon):
    """Graves, 2016, with halted states carried forward.

    Args:
        step: Callable `(n, state) -> state`.
        halting: Callable `state -> h`.
        state: `(..., dim)`.
        running: Boolean `(...)`.

    Returns:
        `(output, statistics)`: `steps`, `remainders`, `probabilities`; and `halting`,
        each h, in `(..., max_steps)`.
    """
    history, h = [], []
    alive = running.copy()
    totals = np.zeros(running.shape)
    for n in range(max_steps):
        state = np.where(alive[..., None], step(n, state), state)
        history.append(state)
        h.append(np.where(alive, halting(state), 0.0))
        totals = totals + h[-1]
        alive = alive & (totals < 1 - epsilon)
    h = np.stack(h, axis=-1)
    shape = running.shape
    steps, remainders = np.zeros(shape), np.zeros(shape)
    probabilities = np.zeros((*shape, max_steps))
    output = np.zeros(state.shape)
    for index in zip(*np.nonzero(running), strict=True):
        reached = np.nonzero(np.cumsum(h[index]) >= 1 - epsilon)[0]
        last = min([*reached, max_steps - 1])
        p = h[index].copy()
        p[last:] = 0
        p[last] = 1 - h[index][:last].sum()
        steps[index], remainders[index] = last + 1, p[last]
        probabilities[index] = p
        output[index] = sum(p[n] * history[n][index] for n in range(max_steps))
    return output, {
        "steps": steps,
        "remainders": remainders,
        "probabilities": probabilities,
        "halting": h,
    }
