"""Fake clocks and workers with known times."""

from keras_efficient_attn.benchmark.worker import Answers

# Steps per call of a fake workload.
STEPS = 4


class FakeClock:
    """A clock that moves only by `sleep`."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class FakeWorker:
    """Answers from `behaviour`, a dict of contestants to functions of the length.

    A function returns the seconds of a call, or raises; `log` records the requests.
    """

    error = 0.25

    def __init__(self, backend, behaviour, clock, log):
        self.backend, self.behaviour = backend, behaviour
        self.clock, self.log = clock, log

    def wait_for_start(self, timeout=None):
        return {"backend": self.backend, "backend_version": "0", "device": "fake"}

    def request(self, message, timeout):
        self.task = message.get("task", getattr(self, "task", None))
        name, length = self.task["contestant"], self.task["length"]
        self.log.append((message["do"], name, length))
        seconds = self.behaviour[name](length)
        if isinstance(seconds, dict):
            return seconds
        if message["do"] == "check":
            return {"error": self.error}
        self.clock.sleep(seconds)
        if message["do"] == "repeat":
            return {"seconds": STEPS * seconds}
        return {
            "first": STEPS * seconds + 3.0,
            "steps": STEPS,
            "tokens": length,
            "operations": 100 * length,
            "memory_bytes": 8 * length,
            "memory_kind": "fake",
            "execution": "fake",
            "finite": True,
        }

    def close(self):
        pass


class InProcessWorker:
    """The worker's side, without a process."""

    def __init__(self, backend):
        self.backend = backend
        self.answers = Answers()

    def wait_for_start(self):
        return {
            "backend": self.backend,
            "backend_version": "0",
            "keras": "0",
            "device": "here",
            "cpu": "some",
            "cpu_count": 1,
        }

    def request(self, message, timeout):
        return self.answers.answer(message)

    def close(self):
        self.answers = None
