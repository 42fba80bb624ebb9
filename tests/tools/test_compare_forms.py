"""Second forms of operations, timed beside the portable ones."""

import keras
import numpy as np
import pytest

from tests.autodiff import to_numpy

if keras.backend.backend() != "torch":
    pytest.skip("the forms are PyTorch's", allow_module_level=True)

from keras_efficient_attn.layers import get_attention
from tools import compare_forms


@pytest.mark.parametrize("form", compare_forms.FORMS)
def test_both_forms_compute_the_same(form):
    portable, layers = compare_forms.FORMS[form]
    x = np.random.default_rng(0).normal(size=(1, 70, 16)).astype("float32")
    for name in layers:
        layer = get_attention(name, num_heads=2, key_dim=8, seed=1)
        with_form = to_numpy(layer(x, x, use_causal_mask=True))
        with compare_forms.replaced(portable()):
            without = to_numpy(layer(x, x, use_causal_mask=True))
        np.testing.assert_allclose(with_form, without, rtol=1e-4, atol=1e-5)


def test_a_row_has_both_medians_and_their_ratio(capsys):
    arguments = ["causal_chunks_torch", "--lengths", "16", "--repeats", "1"]
    compare_forms.main(arguments)
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["linear", "performer"]
    for row in rows:
        _, length, own, portable, ratio = row.split()
        assert length == "16" and float(own) > 0 and float(portable) > 0
        # Milliseconds are rounded to one digit, the ratio to two.
        assert abs(float(ratio) * float(portable) - float(own)) < 0.2 + float(own) / 9
