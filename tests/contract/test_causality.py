"""Point 3: the future does not change the past, bit for bit."""

import numpy as np
import pytest
from keras import ops

from tests.autodiff import gradient_function, to_numpy
from tests.contract.cases import LENGTH, inputs


@pytest.mark.once_a_layer
def test_no_gradient_reaches_the_future(causal_case):
    layer, x = causal_case.built(), inputs(batch=1)
    weight = inputs(batch=1, seed=3)

    def loss(x, chosen):
        output = layer(x, x, use_causal_mask=True)
        return ops.sum(ops.multiply(output, weight) * chosen)

    gradient_at = gradient_function(loss)
    for position in range(0, LENGTH, 3):
        chosen = np.zeros((1, LENGTH, 1), "float32")
        chosen[:, position] = 1
        gradient, _ = gradient_at(x, chosen)
        assert np.all(gradient[:, position + 1 :] == 0)
        assert np.any(gradient[:, : position + 1] != 0)


def test_a_changed_last_token_changes_no_earlier_bit(causal_case):
    layer, x = causal_case.built(), inputs()
    changed = x.copy()
    changed[:, -1] *= 1000
    before = to_numpy(layer(x, x, use_causal_mask=True))
    after = to_numpy(layer(changed, changed, use_causal_mask=True))
    np.testing.assert_array_equal(before[:, :-1], after[:, :-1])
    assert np.any(before[:, -1] != after[:, -1])
