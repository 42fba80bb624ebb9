"""Recurrence in depth, against its definition in NumPy, float64."""

import keras
import numpy as np
import pytest

from keras_efficient_attn import SoftmaxAttention
from keras_efficient_attn.models import (
    EfficientTransformerBackbone,
    FeedForward,
    LearnedPositions,
    PositionOptions,
    RecurrenceOptions,
    SeparableConvolution,
    SinusoidalPositions,
    TransformerBlock,
    UniversalTransformer,
)
from keras_efficient_attn.models.blocks.transformer_stack import StackResults
from tests.autodiff import to_numpy
from tests.dense import sigmoid
from tests.layers.adaptive_computation.adaptive import definition
from tests.models import dense
from tests.models.cases import SIZES, randomize
from tests.ops.common.test_convolution import expected as depthwise
from tests.ops.pieces import read_in_pieces

BATCH, LENGTH, DIM, STEPS = 2, 7, 8, 4
MASK = np.array([[1] * 7, [1] * 4 + [0] * 3], bool)


def inputs(length=LENGTH):
    x = np.random.default_rng(0).normal(size=(BATCH, length, DIM))
    return x.astype("float32")


def make_stack(
    adaptive=None,
    cross=False,
    causal=False,
    residual="pre_norm",
    max_offset=0,
    **options,
):
    block = TransformerBlock(
        SoftmaxAttention(2, 4),
        FeedForward(12, activation="relu"),
        causal=causal,
        cross_attention=SoftmaxAttention(2, 4) if cross else None,
        residual=residual,
    )
    stack = UniversalTransformer(
        [block],
        STEPS,
        positions=SinusoidalPositions(max_offset),
        adaptive_computation=adaptive,
        **options,
    )
    shape = (BATCH, LENGTH, DIM)
    stack.build(shape, shape if cross else None)
    randomize(stack)
    if stack.halting is not None:
        kernel = np.random.default_rng(3).normal(size=(DIM, 1))
        stack.halting.unit.kernel.assign(0.2 * kernel)
        stack.halting.unit.bias.assign([-0.5])
    return stack


def expected_output(stack, x, mask, memory=None, memory_mask=None):
    """Output and statistics by the definition (`None` with fixed steps)."""
    table = dense.numpy(stack.timestep_embedding.table)

    def step(n, x):
        x = x + dense.sinusoids(x.shape[1], DIM) + table[n]
        return dense.block(stack.blocks[0], x, mask, memory, memory_mask)

    x, statistics = x.astype("float64"), None
    if stack.halting is None:
        for n in range(STEPS):
            x = step(n, x)
    else:
        unit = stack.halting.unit
        x, statistics = definition(
            step,
            lambda s: sigmoid(dense.dense(unit, s)[..., 0]),
            np.where(mask[..., None], x, 0.0),
            mask,
            STEPS,
            0.01,
        )
    if stack.final_norm is not None:
        x = dense.normalize(stack.final_norm, x)
    return x, statistics


@pytest.mark.parametrize("residual", ["pre_norm", "post_norm"])
def test_fixed_steps_are_those_of_the_definition(residual):
    stack, x = make_stack(cross=True, causal=True, residual=residual), inputs()
    memory = inputs()[:, ::-1]
    expected, _ = expected_output(stack, x, MASK, memory, MASK)
    received = stack(x, MASK, memory=memory, memory_padding_mask=MASK)
    np.testing.assert_allclose(
        to_numpy(received)[MASK], expected[MASK], rtol=1e-3, atol=1e-3
    )


def test_adaptive_steps_are_those_of_the_definition():
    stack, x = make_stack({"ponder_cost": 0.1}), inputs()
    expected, statistics = expected_output(stack, x, MASK)
    assert len(np.unique(statistics["steps"][MASK])) >= 2
    x[~MASK] = np.nan
    for training in (False, True):
        received, ponder = stack(
            x, padding_mask=MASK, training=training, return_ponder=True
        )
        np.testing.assert_allclose(
            to_numpy(received)[MASK], expected[MASK], rtol=1e-3, atol=1e-3
        )
        for name in ("steps", "remainders", "probabilities"):
            np.testing.assert_allclose(
                to_numpy(ponder[name]), statistics[name], rtol=1e-3, atol=1e-3
            )
        cost = (statistics["steps"] + statistics["remainders"]).sum() / MASK.sum()
        np.testing.assert_allclose(to_numpy(stack.losses[0]), 0.1 * cost, rtol=1e-3)


def test_a_decoder_streams_what_it_computes_at_once():
    """Other tokens attend to tokens that halted early in later steps."""
    stack, x = make_stack({}, causal=True), inputs()
    expected, statistics = expected_output(stack, x, np.ones_like(MASK))
    assert len(np.unique(statistics["steps"])) >= 2
    received, _ = read_in_pieces(
        lambda part, state: stack(part, state=state),
        stack.get_initial_state(BATCH, LENGTH),
        [x],
        sizes=(3, 1, 3),
    )
    np.testing.assert_allclose(received, expected, rtol=1e-3, atol=1e-3)


def test_it_trains_compiled_and_stops_compiled(backend):
    backbone = EfficientTransformerBackbone(
        **SIZES,
        attention="softmax",
        architecture="encoder",
        positions=PositionOptions("learned", max_length=20, each_layer=True),
        recurrence=RecurrenceOptions(
            2, "learned", {"ponder_cost": 0.1, "halting_bias": -2.0}
        ),
    )
    logits = backbone.token_embedding(backbone.output, reverse=True)
    model = keras.Model(backbone.input, logits)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.03), loss, jit_compile=backend != "torch")
    tokens = np.random.default_rng(0).integers(1, 50, (2, 7)).astype("int32")
    data = {"token_ids": tokens, "padding_mask": MASK.astype("int32")}
    history = model.fit(data, tokens, epochs=12, verbose=0).history["loss"]
    assert history[-1] < 0.9 * history[0]
    # Compiled, with early exit.
    predicted = model.predict(data, verbose=0)
    np.testing.assert_allclose(predicted, to_numpy(model(data)), rtol=1e-3, atol=1e-3)


# The parts.


@pytest.mark.parametrize("causal", [True, False])
def test_separable_convolutions_are_those_of_the_definition(causal):
    layer, x = SeparableConvolution(6, (3, 4), "relu", causal), inputs()
    layer.build(x.shape)
    randomize(layer)

    def convolve(kernel, x):
        after = 0 if causal else (len(kernel) - 1) // 2
        return depthwise(x, kernel, len(kernel) - 1 - after, after)

    first, second = (dense.numpy(kernel) for kernel in layer.kernels)
    kept = MASK[..., None]
    h = dense.dense(layer.hidden, convolve(first, np.where(kept, x, 0.0)))
    h = np.where(kept, np.maximum(h, 0.0), 0.0)
    expected = dense.dense(layer.output_dense, convolve(second, h))
    x[~MASK] = np.nan
    received = to_numpy(layer(x, mask=MASK))
    np.testing.assert_allclose(received, expected, rtol=1e-3, atol=1e-4)
    if not causal:
        with pytest.raises(ValueError, match="causal=False"):
            layer(x, state={})
        return
    x = inputs()
    whole = to_numpy(layer(x))
    received, _ = read_in_pieces(
        lambda part, state: layer(part, state=state),
        layer.get_initial_state(BATCH),
        [x],
        sizes=(1, 3, 3),
    )
    np.testing.assert_allclose(received, whole, rtol=1e-4, atol=1e-5)


def test_random_offsets_are_one_shift_in_training_only():
    x = np.zeros((BATCH, LENGTH, DIM), "float32")
    table = dense.sinusoids(LENGTH + 20, DIM)
    layer = SinusoidalPositions(max_offset=20)
    np.testing.assert_allclose(to_numpy(layer(x))[0], table[:LENGTH], atol=1e-5)
    shifts = set()
    for _ in range(10):
        received = to_numpy(layer(x, training=True))
        distances = np.abs(received[0, 0] - table).max(-1)
        shift = int(distances.argmin())
        shifts.add(shift)
        expected = np.broadcast_to(table[shift : shift + LENGTH], x.shape)
        np.testing.assert_allclose(received, expected, atol=1e-5)
    assert len(shifts) > 1 and max(shifts) <= 20
    # Encoder and decoder count from the same number.
    backbone = EfficientTransformerBackbone(
        **{**SIZES, "num_layers": 2},
        attention="softmax",
        architecture="encoder_decoder",
        positions=PositionOptions("sinusoidal", each_layer=True, max_offset=1000),
    )
    layers = [block.positions for block in backbone.transformer_layers]
    received = [to_numpy(layer(x, training=True))[0, 0] for layer in layers]
    assert len(layers) == 4
    np.testing.assert_array_equal(received, np.tile(received[0], (4, 1)))
    # Positions stay within a learned table.
    learned = LearnedPositions(LENGTH, max_offset=20)
    np.testing.assert_array_equal(
        to_numpy(learned(x, training=True)), to_numpy(learned(x))
    )


def test_the_offset_is_the_same_in_all_steps():
    stack, x = make_stack(timestep_embedding=None, max_offset=9), inputs()
    seen = []

    def forget(n, x, *args):
        seen.append(to_numpy(x))
        return 0 * x, StackResults({}, [])

    stack._apply_blocks = forget
    stack(x, training=True)
    assert len(seen) == STEPS
    for signal in seen[1:]:
        np.testing.assert_array_equal(signal, seen[1])
    np.testing.assert_allclose(seen[0] - x, seen[1], rtol=1e-4, atol=1e-5)


@pytest.mark.any_backend
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(recurrence={"timestep_embedding": "none"}),
            "timestep_embedding='none'",
        ),
        (dict(recurrence={"adaptive_computation": 3}), "adaptive_computation=3"),
        (dict(recurrence={"adaptive_computation": {"cost": 1}}), "cost"),
        (dict(recurrence={"adaptive_computation": {"epsilon": 2}}), "epsilon=2"),
        (
            dict(recurrence={"timestep_embedding": "learned"}, residual="reversible"),
            "reversible",
        ),
        (
            dict(feed_forward={"separable_convolution": True, "gated": True}),
            "gated=True, separable_convolution=True",
        ),
        (dict(positions={"max_offset": 5}), "max_offset=5"),
        (
            dict(
                architecture="encoder_decoder",
                positions={"kind": "sinusoidal", "max_offset": 5},
            ),
            "each_layer",
        ),
        (dict(positions={"kind": "sinusoidal", "max_offset": -1}), "max_offset=-1"),
    ],
)
def test_errors_name_what_was_received(options, message):
    with pytest.raises(ValueError, match=message):
        EfficientTransformerBackbone(**{**SIZES, **options})


@pytest.mark.any_backend
def test_a_ponder_that_does_not_exist_is_refused():
    stack = make_stack()
    with pytest.raises(ValueError, match="return_ponder"):
        stack(inputs(), return_ponder=True)


def test_the_layers_of_fixed_steps_are_returned():
    stack = make_stack()
    output, layers = stack(inputs(), return_layers=True)
    assert len(layers) == STEPS
    np.testing.assert_allclose(to_numpy(stack.final_norm(layers[-1])), to_numpy(output))


@pytest.mark.any_backend
def test_adaptive_steps_have_no_layers_to_return():
    with pytest.raises(ValueError, match="adaptive_computation={}"):
        make_stack({})(inputs(), return_layers=True)
