"""The parent's handle of a worker process."""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import keras_efficient_attn
from keras_efficient_attn.benchmark.memory import xla_dump_flags

STARTUP_SECONDS = 600


class WorkerTimeout(Exception):
    """No reply in time."""


class WorkerDied(Exception):
    """The process ended. `killed`: whether by SIGKILL, as when memory runs out."""

    def __init__(self, message, killed):
        super().__init__(message)
        self.killed = killed


class WorkerProcess:
    """A process with Keras on the given backend.

    Args:
        backend: Value of `KERAS_BACKEND`.
        command: Words of the command. Defaults to this package's worker.
        environment: Additional environment variables.
    """

    def __init__(self, backend, command=None, environment=None):
        if command is None:
            command = [sys.executable, "-m", "keras_efficient_attn.benchmark.worker"]
        self._stderr = tempfile.TemporaryFile("w+")
        self._dump = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**_environment(backend, self._dump.name), **(environment or {})},
        )
        self._replies = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_for_start(self, timeout=STARTUP_SECONDS):
        """Waits until the process is ready; returns its environment."""
        return self._reply(timeout)

    def request(self, message, timeout):
        """Sends a dict and returns the reply.

        Raises:
            WorkerTimeout: If there is no reply within `timeout` seconds; `None` waits
                without limit.
            WorkerDied: If the process has ended.
        """
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, OSError):
            pass  # The missing reply will report that it has ended.
        return self._reply(timeout)

    def close(self):
        """Kills the process and closes its pipes."""
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        self._stderr.close()
        self._dump.cleanup()

    def _read(self):
        try:
            for line in self._process.stdout:
                self._replies.put(json.loads(line))
        except ValueError:
            pass  # Closed while reading, or killed while writing a line.
        self._replies.put(None)

    def _reply(self, timeout):
        try:
            reply = self._replies.get(timeout=timeout)
        except queue.Empty:
            raise WorkerTimeout(f"no reply within {timeout:g} s") from None
        if reply is None:
            status = self._process.wait()
            raise WorkerDied(self._last_words(status), status == -signal.SIGKILL)
        return reply

    def _last_words(self, status):
        self._stderr.seek(0)
        lines = self._stderr.read().strip().splitlines()
        return f"exit status {status}" + (f": {lines[-1][:200]}" if lines else "")


def _environment(backend, dump):
    root = str(Path(keras_efficient_attn.__file__).resolve().parents[1])
    # A script's folder holds the modules that register its layers.
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH"), sys.path[0]])]
    environment = {**os.environ, "KERAS_BACKEND": backend}
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    # Workers share a device, so none may preallocate all of its memory.
    environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    environment.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if backend == "tensorflow":
        environment["XLA_FLAGS"] = xla_dump_flags(dump)
    return environment
