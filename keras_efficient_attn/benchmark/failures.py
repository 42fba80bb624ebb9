"""Describes a failure by a status word and a line of detail."""

import re

OUT_OF_MEMORY = "out of memory"
TIME_OUT = "time-out"
UNSUPPORTED = "unsupported"
FAILED = "failed"
SKIPPED = "skipped"
OK = "ok"
DETAIL_LENGTH = 300
REFUSALS = (ValueError, NotImplementedError, AssertionError, ImportError, TypeError)
MEMORY_SIGNS = (
    "out of memory",
    "resource_exhausted",
    "resource exhausted",
    "can't allocate memory",
    "cannot allocate memory",
    "unable to allocate",
    "bad_alloc",
    "oom when allocating",
)


def describe_failure(error, building):
    """The failure as a dict with `status` and `detail`.

    Args:
        error: The exception.
        building: Whether nothing has been measured yet. A `ValueError` or similar then
            means that the contestant does not support the combination.
    """
    text = _plain(str(error)) or type(error).__name__
    status = FAILED
    if isinstance(error, MemoryError) or any(
        sign in f"{type(error).__name__} {text}".lower() for sign in MEMORY_SIGNS
    ):
        status = OUT_OF_MEMORY
    elif building and isinstance(error, REFUSALS):
        status = UNSUPPORTED
    return {"status": status, "detail": text[:DETAIL_LENGTH]}


def _plain(text):
    """One line, without the colours and frame that Keras adds to errors."""
    text = re.sub(r"\x1b\[\d+m", "", text)
    text = re.sub(r"^Exception encountered when calling [^\n]*\n", "", text)
    return " ".join(text.partition("Arguments received by")[0].split())
