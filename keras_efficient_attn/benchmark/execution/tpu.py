"""A TPU that is described, not present, and its compiler's cycle estimates."""

import functools
import re

from jax.experimental import topologies

_HEADER = re.compile(r"^(ENTRY )?%([\w.\-<>]+) \(")
_LOOP = re.compile(r"condition=%([\w.\-<>]+), body=%([\w.\-<>]+)")
_LIMIT = re.compile(r"= s32\[\]\S* constant\((\d+)\)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CALLED = re.compile(r" call\(.*?to_apply=%([\w.\-<>]+)")
_BRANCHES = re.compile(
    r" conditional\(.*?(?:branch_computations=\{([^}]*)\}"
    r"|true_computation=(%\S+), false_computation=(%\S+))"
)
_KERNEL = 'custom_call_target="tpu_custom_call"'


def device(topology):
    """The first device of a slice, such as `"v5e:2x2"`."""
    description = topologies.get_topology_desc(topology_name=topology, platform="tpu")
    return description.devices[0]


def estimated_cycles(text, branch=min):
    """Cycles of a program's entry computation; a loop counts once per trip.

    Args:
        text: The compiled program as text, in which the compiler has noted an
            estimate for each fusion.
        branch: Chooses from the cycles of a conditional's branches. Defaults to `min`,
            because the other branches of layers run once, such as the first draw of a
            codebook. In reversible stacks, the branch that always runs is the `max`.

    Returns:
        `(cycles, kernels)`: handwritten kernels are opaque to the compiler, so they are
            counted but their cycles are not in the sum.
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

    return total(entry), text.count(_KERNEL)


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
