"""Short versions of long runs: states after 100,000 positions or a million steps.

`make long-runs` executes the full runs.
"""

import mmap
import sys

import numpy as np
import pytest
from keras import ops

from tests.autodiff import to_numpy
from tests.contract.cases import inputs
from tests.long_runs import steps
from tests.long_runs.steps import INTERVAL, make_performer, make_vq
from tests.long_runs.streams import CASES, growth, resident_mib

FAR, LENGTH = 100_000, 20
# Their outputs depend only on differences of positions.
ROTATED = ("retention", "gated-delta-shared")


@pytest.mark.parametrize("name", ROTATED)
def test_streams_that_begin_far_away_are_those_that_begin_at_0(name):
    layer, x = CASES[name].built(), inputs(length=LENGTH)
    state = layer.get_initial_state(len(x))

    def outputs(start):
        first = {**state, "position": ops.full_like(state["position"], start)}
        return to_numpy(layer(x, x, state=first, use_causal_mask=True)[0])

    near = outputs(0)
    np.testing.assert_allclose(outputs(FAR), near, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(outputs(2**30), near, rtol=1e-4, atol=1e-5)


def variable(layer, name):
    (found,) = (v for v in layer.variables if v.path.split("/")[-1] == name)
    return found


def test_codes_that_were_idle_for_a_million_steps_move_again():
    layer = make_vq(codes={"revive_after": None, "init": "random"})
    x = np.random.default_rng(0).normal(size=(1, 8, 8)).astype("float32")
    layer.build(x.shape, x.shape)
    sums, count, idle = (variable(layer, n) for n in ("sum", "count", "idle_calls"))
    # A count decays to this, and its sum with it.
    codes = to_numpy(sums)
    count.assign(np.full(count.shape, 0.01))
    sums.assign(codes * 0.01)
    idle.assign(np.full(idle.shape, 1e6))
    layer(x, x, use_causal_mask=True, training=True)
    used = to_numpy(idle) == 0
    assert used.any() and not used.all()
    assert (to_numpy(idle)[~used] == 1e6 + 1).all()
    moved = np.abs(to_numpy(sums) / to_numpy(count)[..., None] - codes).max(-1) > 1e-4
    np.testing.assert_array_equal(moved, used)


def test_features_are_drawn_again_after_millions_of_draws():
    layer, x = make_performer(), np.ones((1, 4, 8), "float32")
    layer.build(x.shape, x.shape)
    # A seed, and the number of draws.
    generator = variable(layer, "seed_generator_state")
    state = to_numpy(generator).copy()
    state[1] = 4_000_000
    generator.assign(state)
    variable(layer, "calls_since_redraw").assign(INTERVAL)
    projection = variable(layer, "projection")
    before = to_numpy(projection).copy()
    layer(x, x, use_causal_mask=True, training=True)
    assert np.abs(to_numpy(projection) - before).max() > 0.1
    assert int(to_numpy(variable(layer, "calls_since_redraw"))) == 1
    assert to_numpy(generator)[1] > 4_000_000


def touched_mib(count):
    """`count` MiB of the system's own, which no allocator serves from memory it has."""
    pages = mmap.mmap(-1, count * 2**20)
    pages.write(b"\1" * len(pages))
    return pages


@pytest.mark.any_backend
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_that_grows_under_an_earlier_peak_is_seen():
    peak = touched_mib(256)
    resident = [resident_mib()]
    peak.close()
    kept = []
    for _ in range(4):
        resident.append(resident_mib())
        kept.append(touched_mib(32))
    resident.append(resident_mib())
    assert resident[-1] < resident[0]
    # 256 MiB fell, and four times 32 MiB came. `write` copies from bytes of as much.
    assert 112 < growth(resident) < 192


def test_codes_that_never_move_keep_the_error_of_other_inputs(monkeypatch):
    monkeypatch.setattr(steps, "BLOCK", 500)
    rows = {name: steps.measure(name, 3000) for name in steps.LAYERS}
    moved, fixed = rows["vq"], rows["vq, without revival"]
    # In half of the steps each code has some keys, or none.
    assert float(moved[1]) < 0.01 < float(fixed[1])
    assert int(moved[2].replace(",", "")) <= 100
    assert int(fixed[2].replace(",", "")) >= 1500
    assert rows["performer, redrawn"] == [*["-"] * 4, "yes"]
