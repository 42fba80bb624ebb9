"""Seconds of training steps."""

import statistics
import time

import keras


class StepClock(keras.callbacks.Callback):
    """Times the steps of an epoch.

    Attributes:
        seconds: List of the seconds of each step since the start of the epoch.
    """

    def on_epoch_begin(self, epoch, logs=None):
        self.seconds = []

    def on_train_batch_begin(self, batch, logs=None):
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        # Reading the loss waits for the step, which may still be running.
        float(logs["loss"])
        self.seconds.append(time.perf_counter() - self._start)

    @property
    def median(self):
        """Median of the steps except the first, which may compile."""
        return statistics.median(self.seconds[1:] or self.seconds)
