"""Backbones whose weights are split, against one device."""

import jax
import keras
import keras_hub
import numpy as np
import pytest

from keras_efficient_attn import LinearAttention
from keras_efficient_attn.distribution import SequenceParallel
from keras_efficient_attn.layers import feature_maps
from keras_efficient_attn.models import (
    EfficientTransformerBackbone,
    convert_backbone,
)
from tests.distribution.virtual_devices.programs import (
    collectives,
    count,
    sent_sizes,
)

# Not the size of an axis of a weight.
ROWS, LENGTH = 4, 40


def make_backbone(attention, **options):
    keras.utils.set_random_seed(0)
    return EfficientTransformerBackbone(
        64,
        num_layers=2,
        num_heads=4,
        hidden_dim=32,
        intermediate_dim=128,
        attention=attention,
        feed_forward=dict(activation="silu", gated=True),
        **options,
    )


def make_distribution(shape, backbone=EfficientTransformerBackbone, **options):
    mesh = keras.distribution.DeviceMesh(
        shape, ("batch", "model"), [f"cpu:{i}" for i in range(np.prod(shape))]
    )
    layout_map = backbone.get_layout_map(mesh, **options)
    return keras.distribution.ModelParallel(
        layout_map=layout_map, batch_dim_name="batch"
    )


def make_inputs(layout=None):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (ROWS, LENGTH)).astype("int32")
    mask = (np.arange(LENGTH) < [[LENGTH], [20], [LENGTH], [7]]).astype("int32")
    inputs = {"token_ids": tokens, "padding_mask": mask}
    if layout is not None:
        place = keras.distribution.distribute_tensor
        inputs = {name: place(x, layout(x.shape)) for name, x in inputs.items()}
    return inputs


def values(backbone, weights, frozen, inputs):
    """The output, and the gradients of a scalar function of it."""

    def loss(weights):
        output, _ = backbone.stateless_call(weights, frozen, inputs)
        kept = inputs["padding_mask"][..., None]
        return (jax.numpy.sin(output) * kept).sum(), output

    return jax.value_and_grad(loss, has_aux=True)(weights)


def compile_values(backbone, inputs):
    weights = [v.value for v in backbone.trainable_variables]
    frozen = [v.value for v in backbone.non_trainable_variables]

    def run(weights, frozen, inputs):
        return values(backbone, weights, frozen, inputs)

    compiled = jax.jit(run).lower(weights, frozen, inputs).compile()
    (_, output), gradients = compiled(weights, frozen, inputs)
    return compiled, np.asarray(output), [np.asarray(g) for g in gradients]


@pytest.mark.parametrize(
    "attention",
    [
        "vq:window=8,num_codes=16",
        "gated-delta",
        "softmax",
        "linear:feature_map=hedgehog",
        # Its heads share matrices.
        LinearAttention(4, 8, feature_map=feature_maps.get("projected")),
    ],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_one_device(attention):
    # The order of sums differs: in float32, layers would enlarge what that rounds.
    with jax.enable_x64(True):
        whole = make_backbone(attention, dtype="float64")
        _, output, gradients = compile_values(whole, make_inputs())
        distribution = make_distribution((2, 4))
        with distribution.scope():
            backbone = make_backbone(attention, dtype="float64")
            query = backbone.decoder.blocks[0].attention.query_dense.kernel.value
            assert query.addressable_shards[0].data.shape == (16, 1, 8)
            inputs = make_inputs(distribution.get_data_layout)
            _, received, received_gradients = compile_values(backbone, inputs)
    np.testing.assert_allclose(received, output, rtol=1e-4, atol=1e-5)
    for a, b in zip(received_gradients, gradients, strict=True):
        # Gradients of a key bias under a softmax are rounding errors only.
        atol = 1e-4 * np.abs(b).max() + 1e-5
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=atol)


def test_a_forward_pass_sums_once_a_sublayer_and_gathers_no_sequence():
    distribution = make_distribution((1, 4))
    with distribution.scope():
        backbone = make_backbone("linear")
        inputs = make_inputs(distribution.get_data_layout)
        weights = [v.value for v in backbone.trainable_variables]

        def forward(weights, inputs):
            return backbone.stateless_call(weights, [], inputs)[0]

        compiled = jax.jit(forward).lower(weights, inputs).compile()
    # The embedding, and attention and feed-forward network of two blocks.
    assert count(compiled) == {"all-reduce": 5}
    assert all(
        sizes == (ROWS, LENGTH, 32)
        for _, shapes in collectives(compiled)
        for _, sizes in shapes
    )


@pytest.mark.parametrize(
    "attention", ["linear", "gated-linear", "gated-delta", "vq:window=8,num_codes=16"]
)
def test_a_training_step_gathers_weights_and_no_rows(attention):
    distribution = make_distribution((2, 2))
    with distribution.scope():
        backbone = make_backbone(attention)
        compiled, *_ = compile_values(
            backbone, make_inputs(distribution.get_data_layout)
        )
    found = collectives(compiled)
    activations = [
        (name, sizes)
        for name, shapes in found
        for _, sizes in shapes
        if LENGTH in sizes
    ]
    # Each device has half of the rows.
    assert {sizes[0] for _, sizes in activations} == {ROWS // 2}
    # The embedding gathers: its columns are split over the axis of the rows.
    assert [name for name, _ in activations].count("all-gather") == 1
    # Five in the forward pass as above, and one for each sublayer's input backward.
    assert count(compiled)["all-reduce"] == 9


def test_key_and_value_heads_that_do_not_divide_are_replicated():
    attention = "linear:num_key_value_heads=2"
    _, output, _ = compile_values(make_backbone(attention), make_inputs())
    distribution = make_distribution((1, 4), num_key_value_heads=2)
    with distribution.scope():
        backbone = make_backbone(attention)
        inputs = make_inputs(distribution.get_data_layout)
        _, received, _ = compile_values(backbone, inputs)
    np.testing.assert_allclose(received, output, rtol=1e-4, atol=1e-5)


def test_a_converted_backbone_is_that_of_one_device():
    def convert():
        keras.utils.set_random_seed(0)
        stock = keras_hub.models.LlamaBackbone(
            vocabulary_size=64,
            num_layers=2,
            num_query_heads=4,
            num_key_value_heads=4,
            hidden_dim=32,
            intermediate_dim=128,
        )
        return convert_backbone(stock, "linear")

    _, output, gradients = compile_values(convert(), make_inputs())
    distribution = make_distribution((1, 4), keras_hub.models.LlamaBackbone)
    with distribution.scope():
        backbone = convert()
        inputs = make_inputs(distribution.get_data_layout)
        _, received, received_gradients = compile_values(backbone, inputs)
    kept = make_inputs()["padding_mask"] == 1
    np.testing.assert_allclose(received[kept], output[kept], rtol=1e-4, atol=1e-5)
    for a, b in zip(received_gradients, gradients, strict=True):
        atol = 1e-4 * np.abs(b).max() + 1e-5
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=atol)


def test_rows_heads_and_positions_are_split_together():
    _, output, gradients = compile_values(make_backbone("linear"), make_inputs())
    axes = "batch", "model", "sequence"
    mesh = keras.distribution.DeviceMesh(
        (2, 2, 2), axes, [f"cpu:{i}" for i in range(8)]
    )
    layout_map = EfficientTransformerBackbone.get_layout_map(
        mesh, sequence_parallel_dim_name="sequence"
    )
    distribution = keras.distribution.ModelParallel(
        layout_map=layout_map, batch_dim_name="batch"
    )
    with distribution.scope(), SequenceParallel(mesh).scope():
        backbone = make_backbone("linear")
        inputs = make_inputs(distribution.get_data_layout)
        compiled, received, received_gradients = compile_values(backbone, inputs)
    np.testing.assert_allclose(received, output, rtol=1e-4, atol=1e-4)
    for a, b in zip(received_gradients, gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(b).max() + 1e-4)
    # No device has all positions.
    assert LENGTH not in sent_sizes(compiled)


def test_fit_trains_as_on_one_device():
    def losses(layout=None):
        keras.utils.set_random_seed(0)
        backbone = make_backbone("linear")
        model = keras.Sequential([keras.layers.Dense(8)])
        outputs = model(backbone.output)
        model = keras.Model(backbone.input, outputs)
        model.compile("adam", "mse")
        inputs = make_inputs()
        targets = np.random.default_rng(1).normal(size=(ROWS, LENGTH, 8))
        history = model.fit(inputs, targets, batch_size=ROWS, epochs=3, verbose=0)
        return history.history["loss"]

    expected = losses()
    with make_distribution((2, 4)).scope():
        received = losses()
    assert expected[-1] < expected[0]
    np.testing.assert_allclose(received, expected, rtol=1e-4)
