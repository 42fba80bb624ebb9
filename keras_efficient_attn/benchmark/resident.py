"""Peak increase of this process's resident memory during a call."""

import ctypes
import gc
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")


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
