"""Workloads: the computation of one contestant at one length, to be timed.

A decoder reads a sequence in segments, then generates one position at a time; both are
loops over the state of a layer or a model.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable

import keras
import numpy as np
from keras import ops

from keras_efficient_attn.benchmark.execution import backend_module, make_program
from keras_efficient_attn.benchmark.layer_figures import (
    BACKWARD,
    decode_operations,
    error_against_softmax,
    layer_operations,
)
from keras_efficient_attn.benchmark.settings import MATMUL
from keras_efficient_attn.layers import get_attention

# Positions generated in a timed call. A call copies its state once; with a single
# position, the copy of a long cache would dominate.
DECODE_STEPS = 32
# Positions per segment: the scores of a whole sequence would be large.
SEGMENT = 256
MATMUL_SIZES = {"cpu": 2048, "accelerator": 8192}


@dataclasses.dataclass
class Workload:
    """A program, its inputs, and its counts and checks.

    Attributes:
        program: Callable of the inputs.
        make_inputs: `rng -> tuple` of new inputs.
        steps: Steps per call; the seconds of a call are divided by it.
        tokens: Tokens per step.
        operations: Useful operations per step, or `None`.
        error: Optional `rng -> float`: the relative error against softmax.
    """

    program: Callable
    make_inputs: Callable
    tokens: int
    operations: int | None = None
    steps: int = 1
    error: Callable | None = None


def build_workload(task):
    """Builds the workload of a task from `Settings.task`.

    Raises:
        ValueError: If the contestant does not support the task.
    """
    keras.utils.set_random_seed(task["seed"])
    if task["module"] is not None:
        importlib.import_module(task["module"])
    if task["contestant"] == MATMUL:
        return _matmul(task)
    if task["model"]:
        return _model(task)
    return _layer(task)


def draw(rng, shape, dtype):
    """Standard normal numbers as a tensor, drawn where the backend computes."""
    seed = int(rng.integers(2**31))
    return keras.random.normal(shape, dtype=dtype, seed=seed)


def read_segments(step, inputs, state):
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


def generate_positions(step, inputs, state):
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


def _matmul(task):
    size = task["matmul_size"]
    if size is None:
        on_cpu = backend_module().device().startswith("cpu")
        size = MATMUL_SIZES["cpu" if on_cpu else "accelerator"]
    dtype = keras.dtype_policies.get(task["dtype"]).compute_dtype

    def make_inputs(rng):
        return draw(rng, (size, size), dtype), draw(rng, (size, size), dtype)

    program = make_program(ops.matmul)
    return Workload(program, make_inputs, tokens=size, operations=2 * size**3)


def _layer(task):
    batch, length, causal = task["batch"], task["length"], task["causal"]
    width = task["heads"] * task["head_dim"]
    layer = get_attention(
        task["contestant"],
        num_heads=task["heads"],
        key_dim=task["head_dim"],
        dtype=task["dtype"],
    )
    layer.build((batch, length, width), (batch, length, width))
    dtype = layer.compute_dtype

    def attend(x, training=False):
        return layer(x, x, use_causal_mask=causal, training=training)

    def make_x(rng, positions=length):
        return draw(rng, (batch, positions, width), dtype)

    def error(rng):
        x = make_x(rng)
        if layer.can_calibrate:
            # Random codes are no estimate; fit them to other inputs.
            layer.calibrate(make_x(rng))
        output = make_program(attend, layer)(x)
        return error_against_softmax(layer, x, output, causal)

    if task["mode"] == "decode":
        workload = _decode(
            layer,
            initial_state=lambda: layer.get_initial_state(
                batch, length + DECODE_STEPS if layer.state_grows else None
            ),
            step=lambda x, state: layer(x, x, use_causal_mask=True, state=state),
            make_tokens=make_x,
            task=task,
            useful=decode_operations(layer, batch, length),
        )
    else:
        workload = _whole_sequence(
            attend,
            layer,
            lambda rng: (make_x(rng),),
            task,
            layer_operations(layer, batch, length, causal),
            lambda rng: (make_x(rng),),
        )
    workload.error = error if layer.estimates_softmax else None
    return workload


def _model(task):
    # Imported lazily: it imports KerasHub, which is an extra.
    from keras_efficient_attn.benchmark import language_model

    batch, length = task["batch"], task["length"]
    model = language_model.make_model(
        task["contestant"], task["heads"], task["head_dim"], task["dtype"]
    )

    def make_tokens(rng, positions=length):
        tokens = rng.integers(0, language_model.VOCABULARY, (batch, positions))
        return ops.convert_to_tensor(tokens.astype("int32"))

    if task["mode"] == "decode":
        return _decode(
            model,
            initial_state=lambda: model.backbone.get_initial_state(
                batch, length + DECODE_STEPS
            ),
            step=functools.partial(language_model.stream, model),
            make_tokens=make_tokens,
            task=task,
            useful=language_model.model_decode_operations(model, batch, length),
        )
    return _whole_sequence(
        functools.partial(language_model.next_token_loss, model),
        model,
        lambda rng: (make_tokens(rng), make_tokens(rng)),
        task,
        language_model.model_operations(model, batch, length),
        lambda rng: (ops.ones((), "float32"),),
        language_model.make_optimizer,
    )


def _whole_sequence(
    run, layer, make_inputs, task, useful, make_cotangent, make_optimizer=None
):
    tokens = task["batch"] * task["length"]
    if task["mode"] == "forward":
        return Workload(make_program(run, layer), make_inputs, tokens, useful)
    program = make_program(
        functools.partial(run, training=True),
        layer,
        gradients=True,
        optimizer=make_optimizer and make_optimizer(layer),
    )
    if useful is not None:
        useful *= 1 + BACKWARD
    return Workload(
        program,
        lambda rng: (*make_cotangent(rng), *make_inputs(rng)),
        tokens,
        useful,
    )


def _decode(layer, initial_state, step, make_tokens, task, useful):
    # Only the state is an output, so that XLA drops what only outputs need.
    fill = make_program(lambda x: read_segments(step, x, initial_state()), layer)
    filled = fill(make_tokens(np.random.default_rng(task["seed"])))
    program = make_program(
        lambda tokens, state: generate_positions(step, tokens, state), layer
    )
    return Workload(
        program,
        lambda rng: (make_tokens(rng, DECODE_STEPS), filled),
        tokens=task["batch"],
        operations=useful,
        steps=DECODE_STEPS,
    )


def _segment(inputs, start, length):
    batch, _, *others = inputs.shape
    starts = (0, start) + (0,) * len(others)
    return ops.slice(inputs, starts, (batch, length, *others))
