"""The repository's only timing loop: contestants take turns."""

import dataclasses
import time

import numpy as np


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one contestant.

    Attributes:
        first: Seconds of the first call, compilation included.
        seconds: Seconds of each later call, as a tuple.
    """

    first: float
    seconds: tuple

    @property
    def median(self):
        """Median of the later calls."""
        return median_and_spread(self.seconds)[0]

    @property
    def spread(self):
        """Lower and upper quartile of the later calls."""
        return median_and_spread(self.seconds)[1:]

    @property
    def compilation(self):
        """Seconds of the first call beyond the median of the later ones."""
        return max(self.first - self.median, 0.0)


def median_and_spread(seconds):
    """Median, lower quartile and upper quartile, as floats."""
    return tuple(float(x) for x in np.percentile(seconds, [50, 25, 75]))


def time_functions(
    functions,
    *,
    make_inputs=None,
    repeats: int = 5,
    clock=time.perf_counter,
    finish=None,
):
    """Times functions in turns, so that a slow spell of the machine hits all of them.

    Each function is called once to compile and warm up, then `repeats` times in
    turns with the others. The clock starts when the inputs are ready on the device and
    stops when the outputs are ready.

    Args:
        functions: Dict of names to callables.
        make_inputs: Optional `(name, turn) -> tuple` of arguments of the function,
            made anew for every call. Turn 0 is the warm-up. Defaults to no arguments.
        repeats: Timed calls of each function. Defaults to 5.
        clock: Callable that gives seconds.
        finish: Callable that waits for inputs or outputs. Defaults to waiting for the
            device of Keras' backend.

    Returns:
        Dict of names to `Timing`.

    Raises:
        ValueError: If `repeats` is not positive.

    Example:

    >>> from keras_efficient_attn import benchmark
    >>> timings = benchmark.time_functions({"sum": lambda: sum(range(1000))})
    >>> timings["sum"].median > 0
    True
    """
    if not isinstance(repeats, int) or repeats < 1:
        raise ValueError(
            f"`repeats` must be a positive integer. Received: repeats={repeats!r}"
        )
    if finish is None:
        from keras_efficient_attn.benchmark.execution import wait as finish

    def sample(name, turn):
        inputs = () if make_inputs is None else make_inputs(name, turn)
        return time_call(functions[name], inputs, clock, finish)[0]

    first = {name: sample(name, 0) for name in functions}
    later = take_turns(functions, repeats, lambda name, turn: sample(name, turn + 1))
    return {name: Timing(first[name], tuple(later[name])) for name in functions}


def time_call(function, inputs, clock, finish):
    """`(seconds, outputs)` of one call; inputs are ready before the clock starts."""
    finish(inputs)
    start = clock()
    outputs = function(*inputs)
    finish(outputs)
    return clock() - start, outputs


def take_turns(names, repeats, sample):
    """Samples of each contestant, one at a time and in turns.

    Args:
        names: Iterable of contestants.
        repeats: Number of turns.
        sample: `(name, turn) -> value`; `None` takes the contestant out of the race.

    Returns:
        Dict of names to lists of values.
    """
    samples = {name: [] for name in names}
    racing = list(samples)
    for turn in range(repeats):
        for name in list(racing):
            value = sample(name, turn)
            if value is None:
                racing.remove(name)
            else:
                samples[name].append(value)
    return samples
