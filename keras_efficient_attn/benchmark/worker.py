"""A process that measures one contestant: requests and replies are JSON lines."""

import datetime
import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path

import keras
import numpy as np
from keras import ops

from keras_efficient_attn import __version__
from keras_efficient_attn.benchmark.execution import backend_module, is_float, wait
from keras_efficient_attn.benchmark.records import describe_failure
from keras_efficient_attn.benchmark.timing import time_call
from keras_efficient_attn.benchmark.workloads import build_workload
from keras_efficient_attn.ops.common.backend import BACKEND


class Measurement:
    """The worker's side: measures one contestant at one length.

    Args:
        task: A task from `Settings.task`.
        clock: Callable that gives seconds.
        build: Callable from the task to its `Workload`.
    """

    def __init__(self, task, clock=time.perf_counter, build=build_workload):
        self._task, self._clock = task, clock
        self._workload = build(task)

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


class Answers:
    """Executes requests, one contestant at a time.

    Args:
        build: Callable from a task to its `Workload`.
    """

    def __init__(self, build=build_workload):
        self._build, self._measurement = build, None

    def answer(self, request):
        """Returns the reply to a request, as a dict; a failure is a reply too."""
        try:
            if request["do"] == "prepare":
                self._measurement = None
                measurement = Measurement(request["task"], build=self._build)
                prepared = measurement.prepare()
                self._measurement = measurement
                return prepared
            if request["do"] == "repeat":
                return self._measurement.repeat(request["turn"])
            return self._measurement.check()
        except Exception as error:
            return describe_failure(error, building=request["do"] == "prepare")


def serve(answer):
    """Says what this process runs on, and answers the requests of the standard input.

    Args:
        answer: Callable from a request to its reply, both dicts.
    """
    # Libraries print to the standard output; replies need a separate stream.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(message):
        print(json.dumps(message), file=replies, flush=True)

    reply(describe_environment())
    for line in sys.stdin:
        reply(answer(json.loads(line)))


def describe_environment():
    """Versions, device and date of this process, a dict of strings and numbers."""
    backend = BACKEND
    return {
        "date": datetime.date.today().isoformat(),
        "backend": backend,
        "backend_version": importlib.metadata.version(backend),
        "device": backend_module().device(),
        "cpu": _cpu(),
        "cpu_count": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "keras": keras.__version__,
        "numpy": np.__version__,
        "keras_efficient_attn": __version__,
    }


def _cpu():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    return names[0].strip() if names else platform.processor()


if __name__ == "__main__":
    serve(Answers().answer)
