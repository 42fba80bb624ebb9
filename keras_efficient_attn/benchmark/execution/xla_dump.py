"""The memory of temporaries, as XLA writes it down for programs that it compiles.

TensorFlow tells nobody how much a compiled program allocates, and its allocator keeps
what was freed, so that resident memory does not show it either. XLA itself writes it
down, for a process that was started with `environment_flags`.
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
    """Bytes of the temporaries of the program that needs most of all so far.

    Returns:
        Bytes, or `None` if XLA has compiled nothing or writes nothing.
    """
    folder = _FOLDER.search(os.environ.get("XLA_FLAGS", ""))
    if folder is None:
        return None
    programs = Path(folder[1]).glob("*buffer-assignment.txt")
    sizes = [sum(map(int, _TEMPORARY.findall(path.read_text()))) for path in programs]
    return max(sizes, default=None)
