"""Measures one workload, one step per request."""

import time

import keras
import numpy as np
from keras import ops

from keras_efficient_attn.benchmark.execution import backend_module, is_float, wait
from keras_efficient_attn.benchmark.timing import time_call
from keras_efficient_attn.benchmark.workloads import build_workload


class Measurement:
    """The worker's side: measures one contestant at one length.

    Args:
        task: A task from `Settings.task`.
        clock: Callable that gives seconds.
    """

    def __init__(self, task, clock=time.perf_counter):
        self._task, self._clock = task, clock
        self._workload = build_workload(task)

    def prepare(self):
        """The first call and the memory of the second, as a dict."""
        first, outputs = self._time(0)
        finite = all(
            bool(ops.all(ops.isfinite(tensor)))
            for tensor in keras.tree.flatten(outputs)
            if is_float(tensor)
        )
        del outputs
        inputs = self._inputs(1)
        memory, kind = backend_module().peak_memory(self._workload.program, inputs)
        return {
            "first": first,
            "steps": self._workload.steps,
            "tokens": self._workload.tokens,
            "operations": self._workload.operations,
            "memory_bytes": memory,
            "memory_kind": kind,
            "execution": getattr(self._workload.program, "execution", None),
            "finite": finite,
        }

    def repeat(self, turn):
        """Seconds of a call on new inputs, as a dict."""
        return {"seconds": self._time(turn + 2)[0]}

    def check(self):
        """The error against softmax, as a dict."""
        error = self._workload.error
        return {"error": error and error(self._rng(0))}

    def _time(self, index):
        return time_call(self._workload.program, self._inputs(index), self._clock, wait)

    def _inputs(self, index):
        inputs = self._workload.make_inputs(self._rng(index))
        wait(inputs)
        return inputs

    def _rng(self, index):
        # All contestants get the same numbers; every call gets new ones.
        return np.random.default_rng((self._task["seed"], self._task["length"], index))
