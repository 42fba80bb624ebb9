"""Compiles the Triton kernels for a GPU that need not be present, and prints numbers.

Run it in a separate process, without `TRITON_INTERPRET`. For each kernel it prints a
line of JSON: the architecture, the call, the kernel, registers per thread, spilled
bytes and bytes of shared memory.
"""

import contextlib
import io
import json
import re
import types

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from keras_efficient_attn.ops.common.feature_kernels import triton_op

KERNELS = (
    "accumulate",
    "find_gradients",
    "find_maxima",
    "read_states",
    "sum_segments",
    "weigh_gradients",
)
# Bytes of shared memory that a program may use, by the architectures' documentation.
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
# Head size, features, dtype, entry.
CALLS = (
    (64, 64, "bfloat16", "elu"),
    (128, 128, "bfloat16", "elu"),
    (64, 256, "bfloat16", "exp"),
    (64, 64, "float32", "elu"),
)


class Compiled:
    """A kernel that is compiled instead of launched."""

    def __init__(self, kernel, report):
        self.kernel, self.report = kernel, report

    def __getitem__(self, grid):
        def compile_for(*arguments, **options):
            log = io.StringIO()
            with contextlib.redirect_stdout(log):
                compiled = self.kernel.warmup(*arguments, grid=grid, **options)
            registers = re.search(r"Used (\d+) registers", log.getvalue())
            if registers is None:
                return  # Compiled before, with the same arguments.
            spilled = re.search(r"(\d+) bytes spill stores", log.getvalue())
            self.report(
                kernel=self.kernel.__name__,
                registers=int(registers[1]),
                spilled=int(spilled[1]),
                shared=compiled.metadata.shared,
            )

        return compile_for


def compile_call(head_dim, features, dtype, entry):
    """The kernels of a causal call with log weights, and of its gradient."""
    tensors = torch.zeros(3, 1, 1024, 2, head_dim, dtype=getattr(torch, dtype))
    rows = None if features == head_dim else torch.zeros(features, head_dim)
    optional = rows, torch.zeros(1, 2, 1024), None, None
    options = f"{entry} normalized"
    outputs = triton_op.linear_attention_op(*tensors, *optional, options)
    gradients = [outputs[0], outputs[1], outputs[3]]
    triton_op.linear_attention_grad_op(
        gradients, list(outputs[:2]), list(tensors), list(optional), options
    )


def main():
    knobs.nvidia.dump_ptxas_log = True
    kernels = {name: getattr(triton_op, name) for name in KERNELS}
    for arch, shared_memory in SHARED_MEMORY.items():
        device = types.SimpleNamespace(
            get_current_device=lambda arch=arch: arch,
            get_current_stream=lambda device: 0,
            get_current_target=lambda arch=arch: GPUTarget("cuda", arch, 32),
        )
        driver.set_active(device)
        triton_op._shared_memory = lambda _, found=shared_memory: found
        for call in CALLS:

            def report(arch=arch, call=call, **numbers):
                print(json.dumps({"arch": arch, "call": call, **numbers}))

            for name, kernel in kernels.items():
                setattr(triton_op, name, Compiled(kernel, report))
            compile_call(*call)


if __name__ == "__main__":
    main()
