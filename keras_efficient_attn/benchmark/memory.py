"""Memory that a call takes: by the system's count, or by the files of XLA.

TensorFlow does not report how much a compiled program allocates. Its allocator keeps
freed memory, so resident memory does not show it either. XLA writes it to a file when
it compiles, if the process was started with `xla_dump_flags`.
"""

import ctypes
import gc
import os
import re
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")
_FOLDER = re.compile(r"--xla_dump_to=(\S+)")
_TEMPORARY = re.compile(r"^allocation \d+: size (\d+), .*preallocated-temp", re.M)


def peak_increase(run):
    """Bytes by which resident memory was higher during `run()` than before it.

    On Linux the peak is reset first. Elsewhere it is the peak since the process
    started, so a call that stays below an earlier peak counts as 0.

    Args:
        run: Callable without arguments.

    Returns:
        Bytes, as an int of at least 0.
    """
    gc.collect()
    _return_freed_memory()
    before = _reset_peak()
    run()
    return max(_peak() - before, 0)


def xla_dump_flags(folder):
    """The value of `XLA_FLAGS` for a process whose XLA writes into `folder`."""
    return f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}".strip()


def temporary_bytes():
    """Bytes of temporaries of the program that XLA compiled last.

    Returns:
        Bytes, or `None` if XLA has compiled nothing or writes nothing.
    """
    folder = _FOLDER.search(os.environ.get("XLA_FLAGS", ""))
    if folder is None:
        return None
    programs = Path(folder[1]).glob("*buffer-assignment.txt")
    last = max(programs, key=lambda path: path.stat().st_mtime_ns, default=None)
    if last is None:
        return None
    return sum(map(int, _TEMPORARY.findall(last.read_text())))


def _reset_peak():
    """Resident bytes now; resets the peak to them if the system allows it."""
    try:
        RESET.write_text("5")
        return _status("VmRSS")
    except OSError:
        return _peak()


def _peak():
    if STATUS.exists():
        return _status("VmHWM")
    import resource  # Imported here because Windows lacks it.

    # In kilobytes; on macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(field):
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{STATUS} has no {field}")


def _return_freed_memory():
    # Otherwise memory freed by the warm-up would be reused unmeasured.
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        pass  # Another C library than GNU's.
