import math

import pytest

from keras_efficient_attn.benchmark import Record, crossover, log_log_slope
from keras_efficient_attn.benchmark.records import Comparison, time_ratios
from keras_efficient_attn.benchmark.settings import MATMUL, Settings

pytestmark = pytest.mark.any_backend


@pytest.mark.parametrize("power", [0.0, 1.0, 1.7, 2.0])
def test_slope_of_a_power_law(power):
    series = {n: 3e-7 * n**power for n in (100, 700, 2048, 30000)}
    assert log_log_slope(series) == pytest.approx(power, abs=1e-9)


def test_slope_is_least_squares():
    # log2 lengths 0, 1, 2 with log2 values 0, 0, 3: slope (3 - 0) / 2.
    assert log_log_slope({1: 1, 2: 1, 4: 8}) == pytest.approx(1.5)


def test_slope_needs_two_points():
    assert log_log_slope({}) is None
    assert log_log_slope({512: 1.0}) is None
    assert log_log_slope({512: 1.0, 1024: 0}) is None


def test_crossover_of_power_laws_between_two_lengths():
    lengths = (100, 1000, 10000)
    quadratic = {n: 1e-6 * n**2 for n in lengths}
    linear = {n: 3e-3 * n for n in lengths}
    # 1e-6 n² = 3e-3 n at n = 3000, and power laws are lines in the logarithms.
    assert crossover(quadratic, linear) == "3000"
    assert crossover(quadratic, {n: 3e-5 * n for n in lengths}) == "≤ 100"
    assert crossover(quadratic, {n: 3.0 * n for n in lengths}) == "> 10000"


def test_crossover_is_the_last_one_and_needs_common_lengths():
    ones = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}
    twice = {1: 0.5, 2: 2.0, 4: 0.5, 8: 0.25, 16: 0.1}
    assert float(crossover(ones, twice)) == pytest.approx(math.sqrt(8), abs=0.5)
    assert crossover({1: 1.0}, {2: 1.0}) is None


def run_with_matmul(rows, matmul_seconds, seconds):
    """A run of softmax on a machine of a certain speed."""
    speed = {"seconds": matmul_seconds, "tokens_per_second": rows / matmul_seconds}
    records = [
        Record(MATMUL, "jax", "forward", 100, "ok", **speed),
        Record("softmax", "jax", "forward", 100, "ok", seconds=seconds),
    ]
    return Comparison(Settings(backend="jax", matmul_size=rows), records, {})


@pytest.mark.parametrize("rows", [1024, 2048])
def test_times_count_in_operations_of_the_matmul(rows):
    # Both machines do 2 * 1024**3 operations in 0.1 s; the second time is 1.5 times.
    before = run_with_matmul(1024, 0.1, seconds=2.0)
    now = run_with_matmul(rows, 0.1 * (rows / 1024) ** 3, seconds=3.0)
    assert time_ratios(now, before) == {("softmax", 100): pytest.approx(1.5)}
    # A machine of half the speed.
    slow = run_with_matmul(rows, 0.2 * (rows / 1024) ** 3, seconds=4.0)
    assert time_ratios(slow, before) == {("softmax", 100): pytest.approx(1.0)}
