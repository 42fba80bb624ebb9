import numpy as np
import pytest

import measure_soft_codes

pytestmark = pytest.mark.any_backend


def test_random_soft_codes_differ_from_performer_by_the_masses_alone():
    from keras import ops

    from keras_efficient_attn.ops import soft_codes

    arguments = measure_soft_codes.parse_arguments(["--dim", "8", "--heads", "2"])
    name = measure_soft_codes.SOFT_RANDOM
    layer = measure_soft_codes.make_layer(name, 5, 0, arguments)
    layer.build((2, 6, 8), (2, 6, 8))
    measure_soft_codes.at_random(layer, 3)
    weights = {weight.name: ops.convert_to_numpy(weight) for weight in layer.weights}
    assert (weights["log_sigma"] == 0).all()
    key = np.random.default_rng(0).normal(size=(2, 6, 2, 4))
    codes, log_weights = weights["codes"], weights["log_weights"]
    share, log_mass = map(
        ops.convert_to_numpy, soft_codes(key, codes, log_weights=log_weights)
    )
    received = np.exp(log_mass)[..., None] * share
    exponents = np.einsum("bshd,hcd->bshc", key, codes)
    expected = np.exp(exponents - np.square(key).sum(-1)[..., None] / 2)
    np.testing.assert_allclose(received, expected, rtol=1e-4)


def test_the_script_prints_its_table(capsys):
    arguments = (
        "--codes 4 --seeds 0 --length 16 --dim 8 --heads 2 --layers 1 --steps 2 "
        "--batch 2 --fit-steps 1 --windows 2"
    )
    assert measure_soft_codes.main(arguments.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index("") + 2 :]
    names = ["softmax", *measure_soft_codes.NAMES]
    assert [line[:16].strip() for line in table] == names
    errors = [float(line[22:].split()[0]) for line in table]
    assert errors[0] == 0 and min(errors[1:]) > 0
