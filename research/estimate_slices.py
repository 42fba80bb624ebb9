"""Compiles training of a byte model for TPU slices that need not be present.

    python research/estimate_slices.py --layers 2 --slices 2x2 4x4 --plot slices.png

Needs libtpu, `pip install -e '.[tpu-compile]'`, which only one process
at a time can use. A row of the table has the compiler's estimates for a step of `fit`,
with Adam and `mixed_bfloat16`: memory, the collectives of the program, and the time
that a chip computes, kernels included by their schedules, without transfers between
chips.
"""

import contextlib
import math
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import folders  # noqa: F401
from command_line import Parser, UsageError, check_heads, command, positive
from tables import show
from tools.tpu_estimate import (
    ENVIRONMENT,
    SCHEDULE_OPTIONS,
    TARGETS,
    devices,
    estimated_cycles,
    kernel_cycles,
)

# Numbers of chips that split the batch, the weights, and the sequence.
AXES = ("batch", "model", "sequence")
MESHES = {
    "2x2": {"data": (4, 1, 1), "model": (1, 4, 1), "sequence": (1, 1, 4)},
    "4x4": {"data": (16, 1, 1), "model": (1, 16, 1), "sequence": (1, 1, 16)},
    "8x8": {"data": (64, 1, 1), "model": (1, 64, 1), "sequence": (1, 1, 64)},
}
PRODUCTS = {"2x2": (1, 2, 2), "4x4": (2, 2, 4), "8x8": (4, 4, 4)}
STRATEGIES = ("data", "model", "sequence", "product")
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
)
TARGET = "tpu-v5e"


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--slices", nargs="+", choices=MESHES, default=list(MESHES))
    add("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    add("--length", type=positive, default=131_072, help="bytes of a sequence")
    parser.add_attention("linear")
    parser.add_model_size(dim=1024, heads=16, layers=12)
    add("--residual", default="reversible", help="reversible keeps no activations")
    add("--plot", metavar="FILE", help="of memory and time by the number of chips")
    parser.add_save()
    arguments = parser.parse_args(argv)
    check_heads(arguments.dim, arguments.heads)
    if arguments.backend not in (None, "jax"):
        raise UsageError(
            "--backend must be jax for this script; received --backend "
            f"{arguments.backend}"
        )
    arguments.backend = "jax"
    return arguments


def make_model(arguments):
    """A compiled language model, on the CPU."""
    import keras

    from keras_efficient_attn.models import EfficientTransformerBackbone

    backbone = EfficientTransformerBackbone(
        256,
        arguments.layers,
        arguments.heads,
        arguments.dim,
        4 * arguments.dim,
        attention=arguments.attention,
        residual=arguments.residual,
        dtype="mixed_bfloat16",
    )
    logits = backbone.token_embedding(backbone.output, reverse=True)
    model = keras.Model(backbone.input, logits)
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.optimizer.build(model.trainable_variables)
    return model


def make_layout_map(mesh, by_model, by_sequence):
    """How weights and the inputs of sublayers are split."""
    import keras

    from keras_efficient_attn.models import EfficientTransformerBackbone

    if by_model == 1:
        return keras.distribution.LayoutMap(mesh)
    return EfficientTransformerBackbone.get_layout_map(
        mesh, sequence_parallel_dim_name="sequence" if by_sequence > 1 else None
    )


def describe_state(model, layout_map):
    """The state of a step, as shapes with shardings."""
    import jax

    mesh = layout_map.device_mesh.backend_mesh

    def describe(variable, path=None):
        layout = layout_map[path or variable.path]
        axes = (None,) * len(variable.shape) if layout is None else layout.axes
        spec = jax.sharding.PartitionSpec(*axes)
        sharding = jax.sharding.NamedSharding(mesh, spec)
        dtype = jax.numpy.dtype(variable.dtype)
        return jax.ShapeDtypeStruct(variable.shape, dtype, sharding=sharding)

    weights = model.trainable_variables
    iterations, learning_rate, *slots = model.optimizer.variables
    # Adam has two slots for each weight, with the weight's sharding.
    slots = [describe(slot, weights[i // 2].path) for i, slot in enumerate(slots)]
    return (
        [describe(weight) for weight in weights],
        [describe(variable) for variable in model.non_trainable_variables],
        [describe(iterations), describe(learning_rate), *slots],
        [describe(variable) for variable in model.metrics_variables],
    )


def describe_batch(rows, length, mesh):
    import jax

    spec = jax.sharding.PartitionSpec("batch", "sequence")
    sharding = jax.sharding.NamedSharding(mesh.backend_mesh, spec)
    tokens = jax.ShapeDtypeStruct((rows, length), "int32", sharding=sharding)
    return {"token_ids": tokens, "padding_mask": tokens}, tokens


def estimate(model, arguments, size, strategy, schedules):
    """The numbers of a row of the table, a dict.

    `schedules` is the `pathlib.Path` in which the compiler writes those of kernels.
    """
    import jax
    import keras

    from keras_efficient_attn.distribution import SequenceParallel
    from keras_efficient_attn.ops.common.plan import plan_for

    shape = PRODUCTS[size] if strategy == "product" else MESHES[size][strategy]
    rows, by_model, by_sequence = shape
    mesh = keras.distribution.DeviceMesh(
        shape, AXES, devices(TARGETS[TARGET], math.prod(shape))
    )
    layout_map = make_layout_map(mesh, by_model, by_sequence)
    distribution = keras.distribution.ModelParallel(
        layout_map=layout_map, batch_dim_name="batch"
    )
    state = describe_state(model, layout_map)
    batch = describe_batch(rows, arguments.length, mesh)
    split = contextlib.nullcontext()
    if by_sequence > 1:
        split = SequenceParallel(mesh).scope()
    start = time.perf_counter()
    # A new function each time: the program cache ignores how tensors are split.
    step = jax.jit(lambda state, data: model.train_step(state, data), donate_argnums=0)
    with plan_for(TARGETS[TARGET].kind), distribution.scope(), split:
        compiled = step.lower(state, batch).compile()
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    found = re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", text)
    # Reversible stacks compute in one branch; the other gives zeros and never runs.
    cycles, _ = estimated_cycles(text, kernel_cycles(text, schedules), branch=max)
    for file in schedules.iterdir():
        file.unlink()
    return {
        "milliseconds": cycles / TARGETS[TARGET].clock * 1e3,
        "state": memory.argument_size_in_bytes / 2**20,
        "temporaries": memory.temp_size_in_bytes / 2**20,
        "collectives": ", ".join(
            f"{found.count(name)} {name}" for name in COLLECTIVES if name in found
        )
        or "none",
        "seconds": time.perf_counter() - start,
    }


def plot(points, path):
    """Writes a picture of rows by strategy, each with its number of chips."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    quantities = (
        ("temporaries", "temporaries, MiB per chip"),
        ("milliseconds", "computing, ms per step"),
    )
    for axes, (field, label) in zip(figure.subplots(1, 2), quantities, strict=True):
        for marker, (strategy, rows) in zip("osD^", points.items(), strict=False):
            chips = [number for number, _ in rows]
            values = [row[field] for _, row in rows]
            axes.plot(chips, values, marker=marker, label=strategy)
        numbers = sorted({number for rows in points.values() for number, _ in rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(numbers, numbers)
        axes.set_ylim(bottom=0)
        axes.set(xlabel="chips", ylabel=f"{label} (estimate)")
    axes.legend()
    figure.savefig(path, dpi=120)


@command(parse_arguments)
def main(arguments):
    folder = tempfile.TemporaryDirectory()
    # Read when JAX is imported.
    os.environ.update(ENVIRONMENT, LIBTPU_INIT_ARGS=f"{SCHEDULE_OPTIONS}{folder.name}")
    import jax

    model = make_model(arguments)
    rows = []
    points = {strategy: [] for strategy in arguments.strategies}
    for size in arguments.slices:
        for strategy in arguments.strategies:
            shape = PRODUCTS[size] if strategy == "product" else MESHES[size][strategy]
            if arguments.heads % shape[1]:
                print(f"{size}, {strategy}: {shape[1]} chips do not divide --heads")
                continue
            try:
                row = estimate(model, arguments, size, strategy, Path(folder.name))
            except jax.errors.JaxRuntimeError as error:
                print(f"{size}, {strategy}: {str(error)[:300]}", flush=True)
                continue
            rows.append(
                [
                    size,
                    strategy,
                    " × ".join(map(str, shape)),
                    f"{row['state']:,.0f}",
                    f"{row['temporaries']:,.0f}",
                    row["collectives"],
                    f"{row['milliseconds']:,.0f}",
                    f"{row['seconds']:.0f}",
                ]
            )
            print(*rows[-1], flush=True)
            points[strategy].append((math.prod(shape), row))
    columns = (
        "v5e",
        "split",
        "batch × model × sequence",
        "state, MiB",
        "temporaries, MiB",
        "collectives in the program",
        "computing, ms",
        "compiled in s",
    )
    show(columns, rows, arguments)
    if arguments.plot:
        plot(points, arguments.plot)


if __name__ == "__main__":
    sys.exit(main())
