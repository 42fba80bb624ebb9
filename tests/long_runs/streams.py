"""Long streams through all contract layers, compared with float64 on PyTorch."""

import math
import os
from pathlib import Path

import numpy as np
from keras import ops

from tests.autodiff import compile_step, to_numpy
from tests.contract.cases import CASES as CONTRACT
from tests.contract.cases import DIM

# Positions per printed error and per program call.
BLOCK = 1000
# For states that hold all positions: positions per call, and of the stream.
GROWING_SEGMENT, GROWING_LENGTH = 100, 10_000


# Every layer with a causal form streams.
CASES = {case.name: case for case in CONTRACT if True in case.causal}


def make(case, dtype):
    """The layer of a case with the default chunks."""
    layer = case.make(dtype=dtype, **({} if "chunk_size" in case.long else case.long))
    layer.build((1, BLOCK, DIM), (1, BLOCK, DIM))
    return layer


def draw_inputs(positions):
    return np.random.default_rng(0).normal(size=(1, positions, DIM)).astype("float32")


def stream(layer, x, segment):
    """Yields the outputs and the state after each `BLOCK` of positions."""
    if layer.state_grows:
        segment = max(segment, GROWING_SEGMENT)

    def step(state, piece):
        output, state = layer(piece, piece, state=state, use_causal_mask=True)
        return state, output

    @compile_step
    def run(state, pieces):
        return ops.scan(step, state, pieces)

    state = layer.get_initial_state(1, x.shape[1] if layer.state_grows else None)
    for start in range(0, x.shape[1], BLOCK):
        pieces = x[:, start : start + BLOCK]
        pieces = pieces.reshape(-1, 1, segment, DIM).astype(layer.variable_dtype)
        pieces = ops.cast(ops.convert_to_tensor(pieces), layer.compute_dtype)
        state, outputs = run(state, pieces)
        # PyTorch would otherwise store the tensors for all blocks' gradients.
        state = {name: ops.stop_gradient(tensor) for name, tensor in state.items()}
        outputs = to_numpy(ops.cast(outputs, layer.variable_dtype))
        yield outputs.reshape(1, -1, DIM), state


def write_reference(case, positions, folder):
    """Writes float32 weights, and float64 outputs with these weights."""
    narrow, wide = make(case, "float32"), make(case, "float64")
    weights = [to_numpy(weight) for weight in narrow.variables]
    for variable, value in zip(wide.variables, weights, strict=True):
        variable.assign(value)
    if wide.state_grows:
        positions = min(positions, GROWING_LENGTH)
    if getattr(wide, "grid", None):
        # An image has only this many positions.
        positions = min(positions, math.prod(wide.grid) // BLOCK * BLOCK)
    # Segments of any length compute the same function; long ones are fast.
    segment = GROWING_SEGMENT if wide.state_grows else BLOCK
    blocks = [block for block, _ in stream(wide, draw_inputs(positions), segment)]
    outputs = np.concatenate(blocks, axis=1)
    path = Path(folder) / f"{case.name}.npz"
    np.savez(path, outputs, *weights)


def measure(case, dtype, folder, segment):
    """Errors over the root mean square of a block's outputs, and memory."""
    with np.load(Path(folder) / f"{case.name}.npz") as arrays:
        reference, *weights = arrays.values()
    layer = make(case, dtype)
    for variable, value in zip(layer.variables, weights, strict=True):
        variable.assign(value)
    errors, resident = [], []
    blocks = stream(layer, draw_inputs(reference.shape[1]), segment)
    for number, (block, state) in enumerate(blocks):  # noqa: B007
        expected = reference[:, number * BLOCK : (number + 1) * BLOCK]
        error = np.abs(block - expected)
        # A position that rounding moves to another bucket has another output.
        error = error.max() if case.smooth else np.quantile(error, 0.9)
        errors.append(error / np.sqrt(np.mean(expected**2)))
        resident.append(resident_mib())
    return {
        "first": errors[0],
        "last": errors[-1],
        "largest": max(errors),
        "state_bytes": sum(to_numpy(tensor).nbytes for tensor in state.values()),
        "growth_mib": growth(resident),
    }


def resident_mib():
    """The memory that this process has now, on Linux.

    Not its peak, under which a later growth is hidden.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def growth(resident):
    """How far memory rises above what it is after the first fifth, which compiles."""
    settled = resident[len(resident) // 5 :]
    return max(settled) - settled[0]
