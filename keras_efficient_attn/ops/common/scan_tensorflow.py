"""`recompute_scan` for TensorFlow: two while loops behind a custom gradient.

TensorFlow's own gradient of a while loop fails under XLA and stores every
intermediate tensor; here the backward loop is handwritten, which avoids both. A single
step runs without a loop, which would double the time to trace and compile.
"""

import functools

import tensorflow as tf

from keras_efficient_attn.ops.common.backend import shape_of


def recompute_scan(
    step,
    carry,
    xs,
    consts=(),
    gradient=None,
    num_steps=None,
    step_size=None,
    reverse=False,
):
    step_gradient = _automatic(step) if gradient is None else gradient
    carry_size, xs_size = len(carry), len(xs)
    if num_steps is None:
        steps = _Rows(xs[0], reverse)
    else:
        steps = _Positions(num_steps, step_size)

    @tf.custom_gradient
    def scan(*arguments):
        # In eager mode, the tape around a custom gradient also records its inside; stop
        # the gradients to prevent this.
        arguments = tuple(tf.stop_gradient(tensor) for tensor in arguments)
        carry = arguments[:carry_size]
        xs = arguments[carry_size : carry_size + xs_size]
        consts = arguments[carry_size + xs_size :]
        final_carry, ys, carries = _forward(step, carry, xs, consts, steps)

        @_once
        def pull(*upstream):
            upstream = upstream[:carry_size], upstream[carry_size:]
            return _backward(step_gradient, carries, xs, consts, ys, *upstream, steps)

        return (*final_carry, *ys), pull

    # Convert variables to tensors: inside, they would count as captured variables.
    outputs = scan(*map(tf.convert_to_tensor, (*carry, *xs, *consts)))
    return outputs[:carry_size], outputs[carry_size:]


def vector_jacobian_product(function, arguments):
    with tf.GradientTape() as tape:
        tape.watch(arguments)
        value = function(*arguments)

    def pull(gradient):
        pairs = [
            (v, g)
            for v, g in zip(value, gradient, strict=True)
            if v is not None and g is not None
        ]
        return tape.gradient(
            [v for v, _ in pairs],
            arguments,
            [g for _, g in pairs],
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )

    return value, pull


def _once(gradient):
    """`gradient`, which reads more than its arguments, for first derivatives only."""

    @tf.custom_gradient
    def pull_once(*upstream):
        def refuse(*_):
            raise NotImplementedError(
                "Second derivatives through recomputed attention are not implemented "
                "on TensorFlow."
            )

        return gradient(*upstream), refuse

    return pull_once


def _automatic(step):
    def gradient(carry, x, consts, y, grad_carry, y_gradient):
        def flat_step(*arguments):
            carry, y = step(*arguments)
            return (*carry, *y)

        _, pull = vector_jacobian_product(flat_step, (carry, x, consts))
        return pull((*grad_carry, *y_gradient))

    return gradient


class _Rows:
    """Steps that each take a row of the leading axis."""

    def __init__(self, x, reverse):
        self.number = tf.shape(x)[0] if x.shape[0] is None else x.shape[0]
        self._reverse = reverse

    def place(self, i):
        """The row of the step that comes after `i` others."""
        return self.number - 1 - i if self._reverse else i

    def cutter(self, tensors):
        """A function from the step number to the step's inputs."""
        return functools.partial(_row, tensors)

    def only(self, tensors):
        """The outputs of a single step."""
        return _as_only(tensors)

    def join(self, stacked):
        return tuple(stacked)


class _Positions:
    """Steps that each take an equal number of positions of axis 1."""

    def __init__(self, num_steps, step_size):
        self.number = num_steps
        self._size = step_size

    def place(self, i):
        return i

    def cutter(self, tensors):
        if isinstance(self.number, int) and self.number == 1:
            return lambda i: tensors
        # Create these operations here, once, instead of in every loop.
        cuts = [self._cut(tensor) for tensor in tensors]

        def cut(i):
            pieces = []
            for tensor, stride, sizes, known in cuts:
                piece = tf.slice(tensor, i * stride, sizes)
                pieces.append(tf.ensure_shape(piece, known))
            return tuple(pieces)

        return cut

    def _cut(self, tensor):
        """The tensor, the offset between pieces, and a piece's shape, twice."""
        batch, length, *tail = shape_of(tensor)
        size = self._size or length // self.number
        stride = tf.stack([0, size] + [0] * len(tail))
        known = [n if isinstance(n, int) else None for n in (batch, size, *tail)]
        return tensor, stride, tf.stack([batch, size, *tail]), known

    def only(self, tensors):
        return tensors

    def join(self, stacked):
        return tuple(map(self._join, stacked))

    def _join(self, stacked):
        steps, batch, size, *tail = shape_of(stacked)
        if stacked.shape[1] != 1:
            stacked = tf.transpose(stacked, [1, 0, *range(2, 3 + len(tail))])
        return tf.reshape(stacked, [batch, steps * size, *tail])


def _forward(step, carry, xs, consts, steps):
    """Runs the loop; returns the last carry, the outputs and each step's carry."""
    cut = steps.cutter(xs)
    if isinstance(steps.number, int) and steps.number == 1:
        final_carry, y = step(carry, cut(0), consts)
        return final_carry, steps.only(y), _as_only(carry)
    if tf.executing_eagerly():
        carries, ys = [], []
        for i in range(int(steps.number)):
            carries.append(carry)
            carry, y = step(carry, cut(steps.place(i)), consts)
            ys.append(y)
        ys = [ys[steps.place(i)] for i in range(int(steps.number))]
        ys = tuple(map(tf.stack, zip(*ys, strict=True)))
        return carry, steps.join(ys), tuple(map(tf.stack, zip(*carries, strict=True)))
    # Only the shapes of the outputs are needed before the loop.
    specs = tf.nest.map_structure(
        lambda t: tf.TensorSpec(t.shape, t.dtype), (carry, cut(0), consts)
    )
    traced = tf.function(step, autograph=False).get_concrete_function(*specs)
    _, y = traced.structured_outputs

    def body(i, carry, carry_arrays, y_arrays):
        carry_arrays, place = _write(carry_arrays, i, carry), steps.place(i)
        new_carry, y = step(carry, cut(place), consts)
        y_arrays = _write(y_arrays, place, y)
        return i + 1, _like(carry, new_carry), carry_arrays, y_arrays

    _, final_carry, carry_arrays, y_arrays = tf.while_loop(
        lambda i, *_: i < steps.number,
        body,
        (0, carry, _arrays(carry, steps.number), _arrays(y, steps.number)),
        maximum_iterations=steps.number,
        parallel_iterations=1,
    )
    carries = tuple(array.stack() for array in carry_arrays)
    return final_carry, steps.join(array.stack() for array in y_arrays), carries


def _backward(step_gradient, carries, xs, consts, ys, grad_carry, grad_ys, steps):
    """Runs the loop backwards, recomputing each step from its stored carry."""
    first_carry = _row(carries, 0)
    cut, cut_y, cut_gradient = map(steps.cutter, (xs, ys, grad_ys))

    def pull_step(i, grad_carry):
        place = steps.place(i)
        x, y, grad_y = cut(place), cut_y(place), cut_gradient(place)
        return step_gradient(_row(carries, i), x, consts, y, grad_carry, grad_y)

    if isinstance(steps.number, int) and steps.number == 1:
        grad_carry, grad_x, grad_consts = pull_step(0, grad_carry)
        gradients = (*grad_carry, *steps.only(grad_x), *grad_consts)
        return tuple(map(tf.convert_to_tensor, gradients))

    def body(i, grad_carry, grad_consts, x_arrays):
        grad_carry, grad_x, grad_const = pull_step(i, grad_carry)
        grad_consts = tuple(
            total + part for total, part in zip(grad_consts, grad_const, strict=True)
        )
        return (
            i - 1,
            _like(first_carry, grad_carry),
            _like(consts, grad_consts),
            _write(x_arrays, steps.place(i), grad_x),
        )

    _, grad_carry, grad_consts, x_arrays = tf.while_loop(
        lambda i, *_: i >= 0,
        body,
        (
            steps.number - 1,
            _like(first_carry, grad_carry),
            tuple(tf.zeros_like(tensor) for tensor in consts),
            _arrays(cut(0), steps.number),
        ),
        maximum_iterations=steps.number,
        parallel_iterations=1,
    )
    grad_xs = steps.join(array.stack() for array in x_arrays)
    return (*grad_carry, *grad_xs, *grad_consts)


def _row(tensors, i):
    return tuple(tensor[i] for tensor in tensors)


def _as_only(tensors):
    """The outputs of a single step, stacked."""
    return tuple(tf.expand_dims(tensor, 0) for tensor in tensors)


def _like(references, tensors):
    """`tensors` with the static shapes of `references`, as loop variables need."""
    return tuple(
        tf.ensure_shape(tensor, reference.shape)
        for reference, tensor in zip(references, tensors, strict=True)
    )


def _arrays(elements, size):
    return tuple(
        tf.TensorArray(t.dtype, size=size, element_shape=t.shape) for t in elements
    )


def _write(arrays, i, tensors):
    return tuple(
        array.write(i, tensor) for array, tensor in zip(arrays, tensors, strict=True)
    )
