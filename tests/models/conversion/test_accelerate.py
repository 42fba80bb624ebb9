"""KerasHub's Qwen 3.5 with the gated delta rule of `ops.linear_attention`."""

import keras
import keras_hub
import numpy as np
import pytest
from keras import ops
from keras_hub.src.models.qwen3_5.qwen3_5_gated_delta_net import (
    _chunk_gated_delta_rule,
)

from keras_efficient_attn import models
from keras_efficient_attn.models.conversion.accelerate import _gated_delta_rule
from tests.autodiff import gradients, to_numpy
from tests.models.cases import prompts
from tests.models.conversion.families import assert_greedy

LENGTH = 70


def qwen(seed=0):
    keras.utils.set_random_seed(seed)
    backbone = keras_hub.models.Qwen3_5Backbone(
        vocabulary_size=50,
        num_layers=2,
        num_query_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        hidden_dim=16,
        intermediate_dim=24,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        layer_types=["linear_attention", "full_attention"],
    )
    random = np.random.default_rng(seed)
    for weight in backbone.trainable_weights:
        weight.assign(random.normal(size=weight.shape, scale=0.3))
    return backbone


def net_of(backbone):
    return backbone.transformer_layers[0]._linear_attn


def prompt(length=LENGTH, seed=1):
    random = np.random.default_rng(seed)
    return random.normal(size=(2, length, 16)).astype("float32")


def initial_cache(net):
    channels = 2 * net.key_dim + net.value_dim
    state = (2, net.num_v_heads, net.head_k_dim, net.head_v_dim)
    return ops.zeros((2, channels, net.conv_kernel_size - 1)), ops.zeros(state)


# On other backends KerasHub's rule takes more than half a minute to compile.
@pytest.mark.any_backend
def test_a_right_padded_batch_keeps_its_outputs_and_weights():
    backbone = qwen()
    random = np.random.default_rng(0)
    mask = np.arange(LENGTH) < np.array([LENGTH, 50])[:, None]
    inputs = {
        "token_ids": random.integers(0, 50, (2, LENGTH)),
        "padding_mask": mask.astype("int32"),
    }
    expected = to_numpy(backbone(inputs))
    weights = backbone.get_weights()
    assert models.accelerate(backbone) is backbone
    output = to_numpy(backbone(inputs))
    np.testing.assert_allclose(output[mask], expected[mask], rtol=1e-4, atol=1e-4)
    for old, new in zip(weights, backbone.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.any_backend
def test_the_state_after_padding_is_that_after_the_prompt():
    backbone = qwen()
    net, x, real = net_of(backbone), prompt(), 50
    mask = np.broadcast_to(np.arange(LENGTH) < real, (2, LENGTH)).astype("int32")

    def state_after(x, mask):
        _, (_, state) = net(x, attention_mask=mask, cache=initial_cache(net))
        return to_numpy(state)

    expected = state_after(x[:, :real], None)
    # KerasHub 0.32 decays the state once for each padded position.
    assert np.abs(state_after(x, mask) - expected).max() > 0.1 * np.abs(expected).max()
    models.accelerate(backbone)
    np.testing.assert_allclose(state_after(x[:, :real], None), expected, atol=1e-4)
    np.testing.assert_allclose(state_after(x, mask), expected, atol=1e-4)


def test_the_rule_is_kerashubs_with_its_gradients():
    random = np.random.default_rng(0)
    shapes = [(2, 20, 2, 8)] * 2 + [(2, 20, 2, 6)] + [(2, 20, 2)] * 2 + [(2, 2, 8, 6)]
    arrays = [random.normal(size=shape).astype("float32") for shape in shapes]
    arrays[3] = -np.exp(arrays[3])
    arrays[4] = 1 / (1 + np.exp(-arrays[4]))
    # The gradients at these are the output and the state.
    arrays += [random.normal(size=shapes[i]).astype("float32") for i in (2, 5)]

    def weigh(rule, **options):
        def function(*tensors):
            *inputs, state, output_weight, state_weight = tensors
            output, last = rule(
                *inputs, initial_state=state, output_final_state=True, **options
            )
            return ops.sum(output * output_weight) + ops.sum(last * state_weight)

        return function

    # KerasHub writes each position of a chunk out; 64 of them take long to compile.
    kerashub = weigh(_chunk_gated_delta_rule, chunk_size=8)
    ours = weigh(_gated_delta_rule)
    expected, actual = gradients(kerashub, *arrays), gradients(ours, *arrays)
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * np.abs(y).max())


def test_tokens_after_a_prompt_are_the_whole():
    net, x = net_of(models.accelerate(qwen())), prompt(20)
    whole = to_numpy(net(x))
    output, cache = net(x[:, :17], cache=initial_cache(net))
    outputs = [to_numpy(output)]
    for t in range(17, 20):
        output, cache = net(x[:, t : t + 1], cache=cache, cache_update_index=t)
        outputs.append(to_numpy(output))
    np.testing.assert_allclose(
        np.concatenate(outputs, axis=1), whole, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("changes", ["task", "backbone"])
def test_generation_gives_the_tokens_of_whole_calls(changes):
    backbone = qwen(seed=2)
    backbone.token_embedding.embeddings.assign(
        3.0 * backbone.token_embedding.embeddings
    )
    if changes == "backbone":
        models.accelerate(backbone)
    task = keras_hub.models.Qwen3_5CausalLM(backbone=backbone, preprocessor=None)
    task.compile(sampler="greedy")
    if changes == "task":
        models.accelerate(task)
    data = prompts([2, 21, 9], length=26, starts=[0, 0, 5])
    tokens = to_numpy(task.generate(dict(data), stop_token_ids=None)["token_ids"])
    assert_greedy(task, data, tokens)


def test_it_trains():
    model = models.accelerate(qwen())
    inputs = {
        "token_ids": np.ones((2, 8), "int32"),
        "padding_mask": np.ones((2, 8), "int32"),
    }
    model.compile("adam", "mse")
    first, *_, last = model.fit(
        inputs, np.zeros((2, 8, 16)), epochs=5, verbose=0
    ).history["loss"]
    assert last < 0.9 * first


@pytest.mark.any_backend
def test_a_model_without_the_rule_is_refused():
    layer = keras.layers.Dense(2)
    layer.build((1, 2))
    with pytest.raises(ValueError, match="gated delta rule.*Received: Sequential"):
        models.accelerate(keras.Sequential([layer]))
