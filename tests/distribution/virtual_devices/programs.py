"""Compiled programs, and the collectives in them."""

import collections
import math
import re

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
)
BYTES = {"f64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "pred": 1}

# The text of a program: computations, `%name (...) -> ... {`, of instructions,
# `%name = shapes operation(...), attributes`.
COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) .*\{$")
COLLECTIVE = re.compile(rf" = (\(?[^(]*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(")
CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%([\w.\-]+)"
)
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def collectives(compiled):
    """The transfers of a compiled program: a list of `(name, shapes)`.

    Those in the body of a loop are there as often as the loop repeats it, and those of
    all branches of a condition once.

    Args:
        compiled: From `jax.jit(f).lower(...).compile()`.

    Returns:
        For each collective its name and the results' shapes, `(dtype, sizes)`.

    Raises:
        ValueError: For transfers in a loop of which the program does not say how often
            it repeats.
    """
    computations, entry = _computations(compiled.as_text())
    return _transfers(computations, entry)


def transfers(compiled):
    """The set of `(name, sizes)` of all results of collectives in a program."""
    computations, _ = _computations(compiled.as_text())
    return {
        (name, sizes)
        for lines in computations.values()
        for name, shapes in filter(None, map(_transfer, lines))
        for _, sizes in shapes
    }


def count(compiled):
    """How many collectives of each kind a program has."""
    return dict(collections.Counter(name for name, _ in collectives(compiled)))


def sent_bytes(compiled):
    """The bytes of the results of all collectives in a program."""
    return sum(
        BYTES[dtype] * math.prod(sizes)
        for _, shapes in collectives(compiled)
        for dtype, sizes in shapes
    )


def sent_sizes(compiled):
    """The lengths of all axes of what collectives send, as a set."""
    shapes = (shapes for _, shapes in collectives(compiled))
    return {size for shape in shapes for _, sizes in shape for size in sizes}


def _computations(text):
    """Lines of each computation, and the name of the entry."""
    found, entry, lines = {}, None, []
    for line in text.splitlines():
        # Numbers of results, between their shapes.
        line = re.sub(r"/\*.*?\*/", "", line)
        # Layouts, which have tiles on a TPU: `{1,0:T(8,128)}`.
        line = re.sub(r"\{[\d,]*:[^{}]*\}", "", line)
        start = COMPUTATION.match(line)
        if start:
            lines = found.setdefault(start[2], [])
            entry = start[2] if start[1] else entry
        else:
            lines.append(line)
    return found, entry


def _transfer(line):
    """`(name, shapes)` of the collective in a line, or `None`."""
    match = COLLECTIVE.search(line)
    if match is None:
        return None
    return match[2], [
        (dtype, tuple(int(n) for n in dims.split(",") if n))
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", match[1])
    ]


def _transfers(computations, name):
    found = []
    for line in computations[name]:
        transfer = _transfer(line)
        if transfer:
            found.append(transfer)
            # The computation that it calls adds two numbers.
            continue
        called = CALLED.findall(line)
        for names in BRANCHES.findall(line):
            called += re.findall(r"%([\w.\-]+)", names)
        inner = [sent for other in called for sent in _transfers(computations, other)]
        if inner and " while(" in line:
            trips = TRIPS.search(line)
            if trips is None:
                raise ValueError(f"A loop with transfers repeats unknown times: {line}")
            inner *= int(trips[1])
        found += inner
    return found
