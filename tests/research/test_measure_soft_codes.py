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


def test_performer_is_soft_codes_on_the_queries_and_keys_of_a_trained_model():
    """The weights of a trained model's layer on text, by two roads of the package."""
    from keras import ops

    from byte_lm.data import batches, load_splits
    from keras_efficient_attn import PerformerAttention
    from keras_efficient_attn.ops import linear_attention, soft_codes

    arguments = measure_soft_codes.parse_arguments(
        "--length 24 --dim 16 --heads 2 --layers 1 --steps 30 --batch 4".split()
    )
    splits = load_splits()
    model = measure_soft_codes.train(splits, 0, arguments)
    inputs, _ = next(batches(splits["test"], 24, 2, seed=0))
    (x,) = measure_soft_codes.attention_inputs(model, inputs["token_ids"])
    trained = model.backbone.transformer_layers[0].attention
    query, key, value = (
        np.einsum("bld,dhk->blhk", x, ops.convert_to_numpy(dense.kernel))
        + ops.convert_to_numpy(dense.bias)
        for dense in (trained.query_dense, trained.key_dense, trained.value_dense)
    )
    # Training has moved them: queries tell keys apart.
    logits = np.einsum("bthd,bshd->bhts", query, key) / np.sqrt(8)
    assert logits.std() > 0.1

    layer = PerformerAttention(2, 8, num_features=32, seed=1)
    layer.build(x.shape, x.shape)
    for name in ("query_dense", "key_dense", "value_dense", "output_dense"):
        weights = getattr(trained, name).get_weights()
        getattr(layer, name).set_weights([weight.copy() for weight in weights])
    expected = ops.convert_to_numpy(layer(x, x, use_causal_mask=True))

    (rows,) = [
        ops.convert_to_numpy(weight)
        for weight in layer.weights
        if tuple(weight.shape) in ((32, 8), (2, 32, 8))
    ]
    codes = np.broadcast_to(rows, (2, 32, 8))
    # √8 is shared between queries and keys.
    scaled = [(part * 8**-0.25).astype("float32") for part in (query, key)]
    share, log_mass = soft_codes(
        scaled[1], codes, log_weights=np.square(codes).sum(-1) / 2
    )
    of_query = np.exp(np.einsum("bthd,hcd->bthc", scaled[0], codes))
    heads = linear_attention(
        ops.convert_to_tensor(of_query),
        share,
        ops.convert_to_tensor(value.astype("float32")),
        key_log_weight=log_mass,
        causal=True,
    )
    output = np.einsum(
        "bthv,hvd->btd",
        ops.convert_to_numpy(heads),
        ops.convert_to_numpy(trained.output_dense.kernel),
    ) + ops.convert_to_numpy(trained.output_dense.bias)
    np.testing.assert_allclose(output, expected, rtol=1e-3, atol=1e-4)


def test_the_script_prints_its_table(printed_table):
    arguments = (
        "--codes 4 --seeds 0 --length 16 --dim 8 --heads 2 --layers 1 --steps 2 "
        "--batch 2 --fit-steps 1 --windows 2"
    )
    assert measure_soft_codes.main(arguments.split()) == 0
    _, *rows = printed_table()
    assert [row[0] for row in rows] == ["softmax", *measure_soft_codes.NAMES]
    errors = [float(row[2]) for row in rows]
    assert errors[0] == 0 and min(errors[1:]) > 0
