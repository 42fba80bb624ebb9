"""TPUs that are described, not present, and the cycles that their compiler expects.

`libtpu` compiles any JAX function for a described device, given as the sharding of its
arguments; the text of the compiled program has the compiler's estimates. Use them to
compare two implementations of one operation.

JAX's private names are in this module alone. They are known to work with JAX 0.10; they
serve the cycles of handwritten kernels, and without them all other cycles are still
counted.
"""

import base64
import dataclasses
import functools
import math
import re


@dataclasses.dataclass(frozen=True)
class Target:
    """An accelerator to compile for.

    Attributes:
        slices: Pairs of a number of devices and the compiler's name for a slice of as
            many, the smallest first.
        kind: Device kind, used to choose the operations' plans.
        clock: Cycles per second.
        peak: Operations per second of products of bfloat16 matrices.
    """

    slices: tuple
    kind: str
    clock: float
    peak: float


# 4 matrix units of 128 by 128, each with a product and a sum per cycle.
TARGETS = {
    "tpu-v5e": Target(
        ((4, "v5e:2x2"), (16, "v5e:4x4"), (64, "v5e:8x8")), "tpu", 1.5e9, 197e12
    )
}
# Environment variables of a process that compiles: the compiler looks for no device,
# and JAX computes on the CPU.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    # Several processes may compile at a time: none of them holds a device.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# With these, and a folder, the compiler writes down its schedules.
SCHEDULE_OPTIONS = (
    "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles "
    "--xla_jf_dump_to="
)

_HEADER = re.compile(r"^(ENTRY )?%([\w.\-<>]+) \(")
_LOOP = re.compile(r"condition=%([\w.\-<>]+), body=%([\w.\-<>]+)")
_LIMIT = re.compile(r"= s32\[\]\S* constant\((\d+)\)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CALLED = re.compile(r" call\(.*?to_apply=%([\w.\-<>]+)")
_BRANCHES = re.compile(
    r" conditional\(.*?(?:branch_computations=\{([^}]*)\}"
    r"|true_computation=(%\S+), false_computation=(%\S+))"
)
_KERNEL = re.compile(r'%(\S+) = [^\n]*custom_call_target="tpu_custom_call"')
_KERNEL_BODY = re.compile(_KERNEL.pattern + r'.*?"body":"([^"]+)"', re.DOTALL)
_BUNDLES = re.compile(r"total scheduled bundles:\s+(\d+)")


def devices(target, count=1):
    """The first devices of the smallest slice that has `count` of them, as a list."""
    # JAX is imported where it is used: a command names targets without it.
    from jax.experimental import topologies

    name = next(name for size, name in target.slices if size >= count)
    description = topologies.get_topology_desc(topology_name=name, platform="tpu")
    return description.devices[:count]


def kernel_cycles(text, folder):
    """Cycles of each handwritten kernel: bundles of its schedule times its programs.

    A bundle takes a cycle if it does not wait, such as for memory. The schedule has
    all branches of a program, and the body of a loop once. The compiler compiles equal
    kernels once, under the name of one of them.

    Args:
        text: The compiled program as text.
        folder: `pathlib.Path` of the compiler's schedules.

    Returns:
        Dict of the kernels' names.
    """
    kernels = _KERNEL_BODY.findall(text)
    cycles = {}
    for body in {body for _, body in kernels}:
        names = [name for name, own in kernels if own == body]
        bundles = _bundles(names, folder) * _programs(base64.b64decode(body))
        cycles.update(dict.fromkeys(names, bundles))
    return cycles


def _bundles(names, folder):
    """The bundles of equal kernels, of which one has a schedule."""
    for name in names:
        for file in folder.glob(f"*-{name}-*schedule-analysis_final_bundles.txt"):
            return int(_BUNDLES.search(file.read_text())[1])
    raise RuntimeError(f"the compiler wrote no schedule of the kernel {names[0]}")


def _programs(kernel):
    """The number of programs of a kernel in its serialised form."""
    from jax._src.lib import tpu as dialect
    from jax.interpreters import mlir

    context = mlir.make_ir_context()
    # JAX has no public name for the kernels' dialect, whose serialised operations
    # have another name.
    dialect.register_dialect(context)
    context.allow_unregistered_dialects = True
    with context:
        module = mlir.ir.Module.parse(kernel)
        bounds = [
            operation.attributes["iteration_bounds"]
            for operation in module.body
            if "iteration_bounds" in operation.attributes
        ]
        return math.prod(size for sizes in bounds for size in sizes)


def estimated_cycles(text, kernels=None, branch=min):
    """Cycles of a program's entry computation; a loop counts once per trip.

    Args:
        text: The compiled program as text, in which the compiler has noted an
            estimate for each fusion.
        kernels: Dict of the cycles of each handwritten kernel, which is opaque to the
            compiler, by name. Defaults to `None`: their cycles are not counted.
        branch: Chooses from the cycles of a conditional's branches. Defaults to `min`,
            because the other branches of layers run once, such as the first draw of a
            codebook. In reversible stacks, the branch that always runs is the `max`.

    Returns:
        `(cycles, number of kernels)`.
    """
    computations, entry = _computations(text)

    @functools.cache
    def total(name):
        return sum(map(cycles, computations.get(name, ())))

    def cycles(line):
        loop = _LOOP.search(line)
        if loop is not None:
            condition, body = loop.groups()
            limits = _LIMIT.findall("\n".join(computations.get(condition, ())))
            return max(map(int, limits), default=1) * total(body)
        kernel = _KERNEL.search(line)
        if kernel is not None:
            return (kernels or {}).get(kernel[1], 0)
        own = _CYCLES.search(line)
        if own is not None:
            return int(own[1])
        called = _CALLED.search(line)
        if called is not None:
            return total(called[1])
        branches = _BRANCHES.search(line)
        if branches is None:
            return 0
        names = ", ".join(filter(None, branches.groups())).split(", ")
        return branch(total(name.strip("%,")) for name in names)

    return total(entry), len(_KERNEL.findall(text))


def _computations(text):
    """The lines of each computation, and the name of the entry."""
    computations, entry, lines = {}, None, []
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header is None:
            lines.append(line)
            continue
        lines = computations.setdefault(header[2], [])
        if header[1]:
            entry = header[2]
    return computations, entry
