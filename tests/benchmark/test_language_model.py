import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.benchmark.execution import make_program
from keras_efficient_attn.benchmark.language_model import (
    make_model,
    model_decode_operations,
    model_operations,
    next_token_loss,
    stream,
)
from keras_efficient_attn.benchmark.layer_figures import (
    decode_operations,
    layer_operations,
)
from keras_efficient_attn.benchmark.settings import Settings
from keras_efficient_attn.benchmark.workloads import (
    build_workload,
    generate_positions,
    read_segments,
)
from tests.autodiff import to_numpy

HEADS, HEAD_DIM, LENGTH, BATCH = 2, 4, 12, 2
WIDTH = HEADS * HEAD_DIM


def build(contestant):
    """The model of a workload, with the weights from its seed."""
    keras.utils.set_random_seed(0)
    return make_model(contestant, HEADS, HEAD_DIM, "float32")


def workload(contestant, mode):
    settings = Settings(
        [contestant], heads=HEADS, head_dim=HEAD_DIM, batch=BATCH, mode=mode, model=True
    )
    return build_workload(settings.task(contestant, LENGTH))


def logits_of(model, tokens):
    mask = ops.ones(tokens.shape, "int32")
    return to_numpy(model({"token_ids": tokens, "padding_mask": mask}))


def loss_of(model, tokens, targets):
    logits = logits_of(model, tokens).astype("float64")
    right = np.take_along_axis(logits, to_numpy(targets)[..., None], -1)[..., 0]
    return np.mean(np.log(np.exp(logits).sum(-1)) - right)


def test_it_streams():
    model = build("performer:feature_map=elu")
    tokens = keras.random.randint((BATCH, LENGTH), 0, 256)

    def step(tokens, state):
        return stream(model, tokens, state)

    def run(tokens):
        state = model.backbone.get_initial_state(BATCH, LENGTH)
        state = read_segments(step, tokens[:, :-2], state)
        return generate_positions(step, tokens[:, -2:], state)[0]

    expected = logits_of(model, tokens)[:, -2:].sum(1, keepdims=True)
    result = to_numpy(make_program(run, model)(tokens))
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_a_training_step_is_one_of_adam():
    training = workload("softmax", "train")
    inputs = training.make_inputs(np.random.default_rng(0))
    _, tokens, targets = inputs
    model = build("softmax")
    results = training.program(*inputs)
    before = loss_of(model, tokens, targets)
    np.testing.assert_allclose(to_numpy(results[0]), before, rtol=1e-5)

    # The first step of Adam, from the gradients.
    program = make_program(
        lambda *inputs: next_token_loss(model, *inputs), model, gradients=True
    )
    weights = model.trainable_variables
    gradients = program(*inputs)[1 : 1 + len(weights)]
    unbiased = np.sqrt(1 - 0.999)
    expected = [
        to_numpy(w) - 1e-3 * unbiased * g / (unbiased * np.abs(g) + 1e-3)
        for w, g in zip(weights, map(to_numpy, gradients), strict=True)
    ]
    for weight, new in zip(weights, expected, strict=True):
        weight.assign(new)
    after = loss_of(model, tokens, targets)
    assert after < before
    again = to_numpy(training.program(*inputs)[0])
    np.testing.assert_allclose(again, after, rtol=1e-5)


@pytest.mark.parametrize("contestant", ["softmax", "performer:feature_map=elu"])
def test_operations_are_those_of_attention_and_dense_layers(contestant):
    model = build(contestant)
    attention = model.backbone.transformer_layers[0].attention
    # Two blocks with two layers of four times the width, and the logits.
    dense = 2 * 2 * 2 * 4 * WIDTH**2 + 2 * WIDTH * 256
    forward = 2 * layer_operations(attention, BATCH, LENGTH, True)
    expected = forward + BATCH * LENGTH * dense
    assert model_operations(model, BATCH, LENGTH) == expected
    decode = 2 * decode_operations(attention, BATCH, LENGTH) + BATCH * dense
    assert model_decode_operations(model, BATCH, LENGTH) == decode
    if contestant == "softmax":
        assert workload(contestant, "forward").operations == expected
        assert workload(contestant, "train").operations == 3 * expected
        assert workload(contestant, "decode").operations == decode
