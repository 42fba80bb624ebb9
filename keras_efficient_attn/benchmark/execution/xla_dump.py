"""The memory of temporaries, from the files that XLA writes when it compiles.

TensorFlow does not report how much a compiled program allocates. Its allocator keeps
freed memory, so resident memory does not show it either. XLA writes it to a file if the
process was started with `environment_flags`.
"""

import os
import re
from pathlib import Path

_FOLDER = re.compile(r"--xla_dump_to=(\S+)")
_TEMPORARY = re.compile(r"^allocation \d+: size (\d+), .*preallocated-temp", re.M)


def environment_flags(folder):
    """The value of `XLA_FLAGS` for a process whose XLA writes into `folder`."""
    return f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}".strip()


def temporary_bytes():
    """Bytes of temporaries of the program that has needed most so far.

    Returns:
        Bytes, or `None` if XLA has compiled nothing or writes nothing.
    """
    folder = _FOLDER.search(os.environ.get("XLA_FLAGS", ""))
    if folder is None:
        return None
    programs = Path(folder[1]).glob("*buffer-assignment.txt")
    sizes = [sum(map(int, _TEMPORARY.findall(path.read_text()))) for path in programs]
    return max(sizes, default=None)
