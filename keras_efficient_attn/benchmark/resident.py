"""Resident memory of this process: what a call adds to it at its peak."""

import ctypes
import gc
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")


def peak_increase(run):
    """Bytes by which resident memory was higher during `run()` than before it.

    On Linux the peak is reset before. Elsewhere it is the peak of the whole life of
    the process, and a call that stays below what was used earlier counts as 0.

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


def _reset_peak():
    """Resident bytes now, where the peak starts again if the system allows it."""
    try:
        RESET.write_text("5")
        return _status("VmRSS")
    except OSError:
        return _peak()


def _peak():
    if STATUS.exists():
        return _status("VmHWM")
    import resource  # Where it is needed, because Windows has none.

    # Kilobytes, but on macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(field):
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{STATUS} has no {field}")


def _return_freed_memory():
    # Else what the warm-up freed would be used again without being seen.
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        pass  # Not the GNU C library.
