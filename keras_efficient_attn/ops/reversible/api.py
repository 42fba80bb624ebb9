"""A chain of residual functions on two streams, whose backward pass rebuilds inputs.

```
x1 = x1 + f(x2)
x2 = x2 + g(x1)
x1 = x1 + ...
```

Each line is inverted by running its function once more: `x2 - g(x1)`. So the whole
chain stores only its last two streams, the functions' states before they ran, and their
remembered values.
"""

import collections

from keras_efficient_attn.ops.common.backend import backend_module

_backend = backend_module(__package__)

Half = collections.namedtuple("Half", ["function", "parameters", "states"])
Half.__doc__ = """One line of the chain.

Attributes:
    function: Pure callable `(x, parameters, states, tensors) -> (y, updates, losses)`:
        `y` of the shape and dtype of `x`, a dict from positions in `states` to new
        values, and a tuple of scalars. It gets its own parameters and states, and all
        of the tensors.
    parameters: Which of the chain's parameters are its own, a tuple of indices.
    states: Which of the chain's states are.
"""


def reversible_chain(halves, x1, x2, parameters, states, tensors):
    """Runs the chain.

    First-order gradients reach both streams, `parameters` and the floating-point
    tensors. Functions run twice, in the forward and the backward pass, from the same
    states; only the first run's updates and losses count. One chain for a whole model
    stores a constant number of activations; a chain per pair of functions would store
    two streams each.

    Args:
        halves: List of `Half`, in the order of computation.
        x1, x2: The streams, of the same shape and dtype.
        parameters: Tuple of floating-point tensors.
        states: Tuple of tensors, of any dtype, that get no gradient.
        tensors: Tuple of further tensors, of any dtype.

    Returns:
        `(y1, y2, losses, updates)`: the streams, a tuple of scalars, and a dict from
        indices of `states` to their last values, if updated.

    Reference:
        - [Gomez et al., 2017](https://arxiv.org/abs/1707.04585)
        - [Kitaev et al., 2020](https://arxiv.org/abs/2001.04451)
    """
    arguments = (list(halves), x1, x2, tuple(parameters), tuple(states), tuple(tensors))
    return _backend.reversible_chain(*arguments)
