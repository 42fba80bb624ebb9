"""Logits of checkpoints equal those of the published code, in `golden.npz`."""

import numpy as np
import pytest

from tests.autodiff import to_numpy
from tests.models.checkpoints.cases import FOLDERS, golden, inputs, load

TOLERANCE = 2e-3


@pytest.mark.parametrize("name", FOLDERS)
def test_whole_and_streamed_token_by_token(name):
    model, (ids, expected) = load(name), golden(name)
    logits = to_numpy(model(inputs(ids)))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)
    cache = model.get_initial_cache(len(ids), ids.shape[1])
    for t in range(ids.shape[1]):
        logits, _, cache = model.call_with_cache(ids[:, t : t + 1], cache, t)
        np.testing.assert_allclose(
            to_numpy(logits)[:, 0], expected[:, t], rtol=0, atol=TOLERANCE
        )
