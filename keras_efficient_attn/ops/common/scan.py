"""A scan over chunks whose backward pass recomputes each step.

`keras.ops.scan` does not train on TensorFlow under XLA, and on every backend it
keeps all intermediate tensors of all steps for the backward pass. This scan is
the backend's own loop; the backward pass keeps only the carry at each step and
runs the step again.

`recompute_scan(step, carry, xs, consts=(), gradient=None, num_steps=None,
step_size=None, reverse=False)` runs `step` over parts of `xs`, recomputing it for
gradients:

```
for i in range(num_steps):
    carry, y = step(carry, tuple(x[i] for x in xs), consts)
```

Memory for the backward pass is one carry per step, plus one step's intermediates,
plus `xs`, and with `gradient` the outputs. Gradients reach `carry`, `xs` and
`consts`; second derivatives exist on JAX only. There `jax.jvp` works over a leading
axis, and with `num_steps` only of a gradient. `step` must be a pure function of its
arguments: tensors it needs are passed in `consts`, never captured. On JAX the
compiled loop is cached by the identity of `step`, so pass the same function object
for the same computation.

Args:
    step: Callable `(carry, x, consts) -> (carry, y)`; all are tuples of tensors.
        `carry` keeps its shapes and dtypes, and `y` is of floating-point tensors.
    carry: Tuple of tensors, the initial carry.
    xs: Non-empty tuple of tensors; integers have no gradient.
    consts: Tuple of tensors that every step reads; likewise.
    gradient: Optional handwritten derivative of the step, `(carry, x, consts, y,
        carry_gradient, y_gradient) -> (carry_gradient, x_gradient,
        consts_gradient)`. JAX ignores it for a leading axis.
    num_steps: `None` for steps along a common leading axis of `xs`. A number for
        steps along axis 1: each step gets the next `size` positions of every `x` of
        shape `(batch, num_steps * size, ...)`, without transposing.
    step_size: The `size`, if equal for all of `xs`. Required if `num_steps` is not
        known statically and `size` is.
    reverse: Whether the last step along a leading axis comes first. Outputs keep their
        places.

Returns:
    `(carry, ys)`: the last carry, and the outputs; stacked on a new leading axis
    or, with `num_steps`, joined along axis 1.

`vector_jacobian_product(function, arguments)` gives the value of a function, and its
pullback: output gradient to argument gradients. It is for handwritten backward passes,
where no gradients are recorded.

Args:
    function: Callable of tuples of tensors that returns a tuple, whose elements
        may be `None`.
    arguments: Tuple of tuples of tensors.

Returns:
    `(value, pull)`: `pull(gradient)` takes a tuple like `value`, with `None` for
    zero, and returns tuples like `arguments`.
"""

import importlib

from keras_efficient_attn.ops.common.backend import BACKEND

# Imported now: `torch.compile` cannot trace an import.
_backend = importlib.import_module(f"{__name__}_{BACKEND}")
recompute_scan = _backend.recompute_scan
vector_jacobian_product = _backend.vector_jacobian_product
