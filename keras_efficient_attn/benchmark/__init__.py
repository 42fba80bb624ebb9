"""Measures which attention is fastest on this machine, at a given shape.

`python -m keras_efficient_attn.benchmark --help` is the command; `compare` is the same
from Python, and `time_functions` times any functions in the same loop.
"""

from keras_efficient_attn.benchmark.compare import compare
from keras_efficient_attn.benchmark.execution import compile_function
from keras_efficient_attn.benchmark.records import (
    Comparison,
    Record,
    Summary,
    crossover,
    log_log_slope,
)
from keras_efficient_attn.benchmark.timing import Timing, time_functions

__all__ = [
    "Comparison",
    "Record",
    "Summary",
    "Timing",
    "compare",
    "compile_function",
    "crossover",
    "log_log_slope",
    "time_functions",
]
