"""A million training steps of counters and moving averages, simulated by calls.

    KERAS_BACKEND=jax python -m tests.long_runs.steps

Halfway the inputs change. Prints the errors of the codes and the counters then and at
the end, and whether features still change.
"""

import argparse
import sys
from pathlib import Path

import keras
import numpy as np
from keras import ops

from keras_efficient_attn import PerformerAttention, VQAttention
from tests.autodiff import compile_step, to_numpy

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
from tables import show  # noqa: E402

DIM, LENGTH, BLOCK = 8, 8, 10_000
INTERVAL = 1000


def make_vq(**options):
    """Codes for one head; the inputs below need four."""
    return VQAttention(1, DIM, num_codes=8, window=None, seed=1, **options)


def make_performer():
    return PerformerAttention(1, DIM, num_features=8, redraw_interval=INTERVAL, seed=1)


LAYERS = {
    "vq": make_vq,
    "vq, without revival": lambda: make_vq(codes={"revive_after": None}),
    "performer, redrawn": make_performer,
}


def run(layer, steps):
    """Calls a layer in training; halfway the inputs change.

    Yields the number of steps and the variables by name, after each `BLOCK`.
    """
    layer.build((1, LENGTH, DIM), (1, LENGTH, DIM))
    rng = np.random.default_rng(0)
    # Each position sees one of four vectors; the four change halfway.
    kinds = ops.convert_to_tensor(rng.normal(size=(2, 4, DIM)).astype("float32"))
    order = ops.convert_to_tensor(rng.integers(0, 4, (64, LENGTH)).astype("int32"))
    trainable = [variable.value for variable in layer.trainable_variables]

    def step(variables, number):
        half = ops.cast(number >= steps // 2, "int32")
        x = ops.take(kinds[half], order[number % 64], axis=0)[None]
        _, variables = layer.stateless_call(
            trainable, variables, x, x, use_causal_mask=True, training=True
        )
        return variables, None

    @compile_step
    def block(variables, numbers):
        return ops.scan(step, variables, numbers)[0]

    variables = [variable.value for variable in layer.non_trainable_variables]
    names = [variable.path.split("/")[-1] for variable in layer.non_trainable_variables]
    for start in range(0, steps, BLOCK):
        numbers = np.arange(start, start + BLOCK, dtype="int32")
        variables = block(variables, ops.convert_to_tensor(numbers))
        values = dict(zip(names, map(to_numpy, variables), strict=True))
        yield start + BLOCK, values


def measure(name, steps):
    """The cells of a layer's row."""
    keras.utils.set_random_seed(0)
    before, halfway = {}, {}
    for done, values in run(LAYERS[name](), steps):
        for value in values.values():
            assert np.isfinite(value).all(), (name, done)
        if done == steps - BLOCK:
            before = values
        if done == steps // 2:
            halfway = values
    if "error" in values:
        ratios = [v["error"][0, 0] / v["error"][0, 1] for v in (halfway, values)]
        errors = [f"{np.sqrt(ratio):.1e}" for ratio in ratios]
        idle, least = values["idle_calls"].max(), values["count"].min()
        return [*errors, f"{idle:,.0f}", f"{least:.1e}", "-"]
    changed = any((values[key] != before[key]).any() for key in values)
    return ["-", "-", "-", "-", "yes" if changed else "no"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--save", type=Path, metavar="FILE", help="the table, as JSON")
    arguments = parser.parse_args()
    if arguments.steps % (2 * BLOCK):
        parser.error(
            f"argument --steps: must be a multiple of {2 * BLOCK:,}; received "
            f"{arguments.steps}"
        )
    arguments.command = ["-m", "tests.long_runs.steps", *sys.argv[1:]]
    rows = [[name, *measure(name, arguments.steps)] for name in LAYERS]
    header = ["layer", "error of the codes, halfway", "at the end"]
    header += ["calls without a key, at most", "least count"]
    show([*header, "features still change"], rows, arguments)


if __name__ == "__main__":
    main()
