"""Logits of checkpoints equal those of the published code, in `golden.npz`."""

import itertools

import numpy as np
import pytest

from tests.autodiff import to_numpy
from tests.models.checkpoints.cases import FOLDERS, golden, inputs, load

TOLERANCE = 2e-3


@pytest.mark.parametrize("name", FOLDERS)
def test_whole_and_streamed(name):
    model, (ids, expected) = load(name), golden(name)
    logits = to_numpy(model(inputs(ids)))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)
    cache = model.get_initial_cache(len(ids), ids.shape[1])
    # Token by token, and then the rest at once.
    ends = [*range(1, 7), ids.shape[1]]
    for start, end in itertools.pairwise([0, *ends]):
        logits, _, cache = model.call_with_cache(ids[:, start:end], cache, start)
        np.testing.assert_allclose(
            to_numpy(logits), expected[:, start:end], rtol=0, atol=TOLERANCE
        )
