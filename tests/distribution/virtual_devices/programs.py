"""Compiled programs, and the collectives in them."""

import re

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
)
BYTES = {"f64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "pred": 1}


def collectives(compiled):
    """The transfers of a compiled program: a list of `(name, shapes)`.

    Args:
        compiled: From `jax.jit(f).lower(...).compile()`.

    Returns:
        For each collective its name and the results' shapes, `(dtype, sizes)`.
    """
    found = []
    names = "|".join(COLLECTIVES)
    pattern = re.compile(rf"= (\(?[^=]*?) ({names})(?:-start)?\(")
    for line in compiled.as_text().splitlines():
        match = pattern.search(line)
        if match:
            shapes = re.findall(r"(\w+)\[([\d,]*)\]", match.group(1))
            sizes = [
                (dtype, tuple(int(n) for n in dims.split(",") if n))
                for dtype, dims in shapes
            ]
            found.append((match.group(2), sizes))
    return found


def count(compiled):
    """The number of collectives of each kind in a program."""
    names = [name for name, _ in collectives(compiled)]
    return {name: names.count(name) for name in COLLECTIVES if name in names}


def sent_bytes(compiled):
    """The total bytes of all collectives' results in a program."""
    total = 0
    for _, shapes in collectives(compiled):
        for dtype, sizes in shapes:
            elements = 1
            for size in sizes:
                elements *= size
            total += BYTES[dtype] * elements
    return total
