"""`reversible_chain` for TensorFlow."""

import tensorflow as tf

from keras_efficient_attn.ops.reversible.passes import backward, forward, never


def reversible_chain(halves, x1, x2, parameters, states, tensors):
    sizes = 2, len(parameters), len(states), len(tensors)
    shape = {}

    @tf.custom_gradient
    def chain(*arguments):
        # In eager mode, the tape around a custom gradient also records its inside; stop
        # the gradients to prevent this.
        arguments = [tf.stop_gradient(tensor) for tensor in arguments]
        (x1, x2), parameters, states, tensors = _split(arguments, sizes)
        (streams, losses, updates), before = forward(
            halves, x1, x2, parameters, states, tensors, _branch
        )
        shape.update(losses=len(losses), updated=list(updates))

        def gradient(*upstream):
            grad_streams, grad_parameters, grad_tensors = backward(
                halves,
                streams,
                upstream[:2],
                upstream[2 : 2 + len(losses)],
                before,
                parameters,
                tensors,
                _branch,
            )
            every = (
                *grad_streams,
                *grad_parameters,
                *[None] * len(states),
                *grad_tensors,
            )
            return [None if g is None else tf.convert_to_tensor(g) for g in every]

        return (*streams, *losses, *updates.values()), gradient

    # Convert variables to tensors: inside, they would count as captured variables.
    arguments = (x1, x2, *parameters, *states, *tensors)
    outputs = chain(*map(tf.convert_to_tensor, arguments))
    (y1, y2), losses, values = _split(
        outputs, (2, shape["losses"], len(shape["updated"]))
    )
    return y1, y2, losses, dict(zip(shape["updated"], values, strict=True))


def _branch(function, arguments, like):
    """`function(*arguments)`; in backward graphs as a branch of a conditional.

    Graphs are ordered by data dependencies only; XLA runs a branch separately. Without
    XLA its operations mix with the others and wait for control dependencies.
    """
    if like is None or tf.executing_eagerly():
        return function(*arguments)

    def compute():
        results = tf.nest.map_structure(tf.convert_to_tensor, function(*arguments))
        # Otherwise earlier halves would be rebuilt before this half's gradients.
        with tf.control_dependencies(tf.nest.flatten(results)):
            return tf.nest.map_structure(tf.identity, results)

    return tf.cond(
        never(arguments[0]),
        lambda: tf.nest.map_structure(tf.zeros_like, like),
        compute,
    )


def _split(items, sizes):
    parts, start = [], 0
    for size in sizes:
        parts.append(tuple(items[start : start + size]))
        start += size
    return parts
