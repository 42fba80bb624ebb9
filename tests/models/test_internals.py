"""Newer versions of Keras and KerasHub, without the undocumented parts of today."""

import sys
from pathlib import Path

import keras
import keras_hub
import numpy as np
import pytest
from keras import ops
from keras.src.backend.common import global_state
from keras_hub.src.models.qwen3_5 import qwen3_5_gated_delta_net as qwen_module
from keras_hub.src.models.t5.t5_multi_head_attention import T5MultiHeadAttention
from keras_hub.src.models.t5.t5_transformer_layer import T5TransformerLayer
from keras_hub.src.utils import preset_utils

from keras_efficient_attn.layers import keras_internals
from keras_efficient_attn.layers.keras_internals import MissingAttribute
from keras_efficient_attn.models import (
    EfficientTransformerBackbone,
    accelerate,
    convert_backbone,
    keras_hub_internals,
    replace_attention,
)
from keras_efficient_attn.models.conversion.adapters import bucket_distances
from tests.models.conversion import families
from tests.models.conversion.test_accelerate import qwen


def hide(monkeypatch, owner, name):
    """Takes an attribute from all objects of a class."""

    def missing(self):
        raise AttributeError(name)

    monkeypatch.setattr(owner, name, property(missing), raising=False)


REPLACEMENT = keras.layers.MultiHeadAttention(2, 4)


def functional_model():
    """A Functional model and its attention layer."""
    inputs = keras.Input((None, 8))
    attention = keras.layers.MultiHeadAttention(2, 4)
    outputs = keras.layers.Dense(1)(attention(inputs, inputs))
    return keras.Model(inputs, outputs), attention


def replace_in(model, layer):
    keras_internals.replace_child(model, layer, REPLACEMENT)


def graph_node(layer):
    return type(layer._inbound_nodes[0])


def tracker(layer):
    return type(layer._tracker)


def called_alone(model, layer):
    assert keras_internals.is_called_alone(layer)
    # Asked outside a call, Keras has begun one.
    layer._maybe_reset_call_context()


def layer_with_lora():
    layer = keras.layers.Dense(2)
    layer.build((None, 2))
    layer.enable_lora(1)
    return layer


# The class, the name, and what uses it of a Functional model and its attention layer.
KERAS = [
    (keras.Layer, "_layers", lambda m, a: keras_internals.tracked_layers(a)),
    (keras.Layer, "_layers", lambda m, a: keras_internals.flat_layers(m)),
    (keras.Layer, "_layers", lambda m, a: keras_internals.own_variables(a)),
    (
        keras.Layer,
        "_dtype_policy",
        lambda m, a: keras_internals.set_dtype_policy(a, "float32"),
    ),
    (keras.Layer, "_get_call_context", called_alone),
    (keras.Operation, "_inbound_nodes", lambda m, a: keras_internals.call_arguments(a)),
    (graph_node, "arguments", lambda m, a: keras_internals.call_arguments(a)),
    (keras.Layer, "_tracker", replace_in),
    (tracker, "replace_tracked_value", replace_in),
    (keras.Function, "_operations_by_depth", replace_in),
    (keras.Operation, "_inbound_nodes", replace_in),
    (keras.Operation, "_outbound_nodes", replace_in),
    (graph_node, "outputs", replace_in),
    (keras.KerasTensor, "_keras_history", replace_in),
    (
        keras.Layer,
        "_flatten_layers",
        lambda m, a: keras_hub_internals.hidden_layers(m, [a]).__enter__(),
    ),
]
# On the backend that has it.
ONE_BACKEND = {
    "torch": [
        (
            keras.Layer,
            "_track_variables",
            lambda m, a: keras_internals.track_parameters(m),
        )
    ],
    "jax": [
        (
            keras.Model,
            "jax_state_sync",
            lambda m, a: keras_internals.update_variables(m),
        )
    ],
}
CASES = [
    pytest.param(*case, marks=pytest.mark.any_backend, id=f"{case[1]}-{i}")
    for i, case in enumerate(KERAS)
]
CASES += [
    pytest.param(*case, id=case[1])
    for case in ONE_BACKEND.get(keras.backend.backend(), [])
]


@pytest.mark.parametrize("owner, name, use", CASES)
def test_a_missing_part_of_keras_is_named(monkeypatch, owner, name, use):
    model, attention = functional_model()
    if not isinstance(owner, type):
        owner = owner(attention)
    with monkeypatch.context() as patch:
        hide(patch, owner, name)
        with pytest.raises(
            MissingAttribute, match=rf"keras .* has no `.*\.{name}`.*3\.15"
        ):
            use(model, attention)
    # Nothing was replaced.
    x = np.random.default_rng(0).normal(size=(1, 3, 8)).astype("float32")
    assert attention in model.layers
    assert model(x).shape == (1, 3, 1)
    use(model, attention)


@pytest.mark.any_backend
@pytest.mark.parametrize(
    "name, use",
    [
        ("AutocastScope", keras_internals.without_autocast),
        ("get_keras_mask", lambda: keras_internals.implicit_mask(np.zeros((1, 2)))),
    ],
)
def test_missing_functions_of_keras_are_named(monkeypatch, name, use):
    use()
    monkeypatch.delattr(keras.src.backend, name)
    with pytest.raises(MissingAttribute, match=rf"keras .* has no `.*\.{name}`"):
        use()


@pytest.mark.any_backend
@pytest.mark.parametrize("name", ["lora_rank", "lora_alpha"])
def test_missing_options_of_lora_are_named(monkeypatch, name):
    layer = layer_with_lora()
    assert keras_internals.lora_of(layer) == (1, 1)
    hide(monkeypatch, keras.layers.Dense, name)
    with pytest.raises(MissingAttribute, match=f"Dense.{name}"):
        keras_internals.lora_of(layer)


@pytest.mark.any_backend
def test_missing_factors_of_lora_are_named():
    model = keras.Sequential([layer_with_lora()])
    assert len(keras_internals.lora_variables(model)) == 2
    # By other names.
    for variable in model.weights:
        variable._name = f"adapter_{variable.name}"
    with pytest.raises(MissingAttribute, match="Sequential.lora_kernel_a"):
        keras_internals.lora_variables(model)


@pytest.mark.any_backend
def test_missing_parts_of_variables_are_named(monkeypatch):
    with monkeypatch.context() as patch:
        patch.delattr(global_state, "set_global_attribute")
        with pytest.raises(MissingAttribute, match="global_state.set_global_attribute"):
            keras_internals.deferred_variables().__enter__()
    missing = pytest.raises(MissingAttribute, match="Variable._initializer")
    with missing, keras_internals.deferred_variables():
        variable = keras.Variable("zeros", shape=(2,))
        del variable._initializer
        keras_internals.set_initializer(variable, None)


@pytest.mark.any_backend
@pytest.mark.parametrize(
    "name", ["_query_dense", "_key_dense", "_value_dense", "_output_dense"]
)
def test_a_missing_projection_is_named(name):
    _, attention = functional_model()
    delattr(attention, name)
    with pytest.raises(MissingAttribute, match=f"MultiHeadAttention.{name}"):
        keras_internals.projections(attention)


@pytest.mark.any_backend
def test_a_model_is_unchanged_after_the_error(monkeypatch):
    model, attention = functional_model()
    x = np.random.default_rng(0).normal(size=(1, 3, 8)).astype("float32")
    before = ops.convert_to_numpy(model(x))
    with monkeypatch.context() as patch:
        hide(patch, tracker(attention), "replace_tracked_value")
        with pytest.raises(MissingAttribute, match="Tracker.replace_tracked_value"):
            replace_attention(model, "local:window=1")
    np.testing.assert_array_equal(ops.convert_to_numpy(model(x)), before)
    with pytest.warns(UserWarning, match="compiled again"):
        assert replace_attention(model, "local:window=1")


@pytest.mark.any_backend
def test_no_layer_is_replaced_in_place_before_the_error(monkeypatch):
    backbone = families.make("t5")
    monkeypatch.delattr(T5TransformerLayer, "_compute_self_attention_mask")
    with pytest.raises(MissingAttribute, match="_compute_self_attention_mask"):
        replace_attention(backbone, "local:window=2")
    assert not families.efficient_layers(backbone)


def convert(name):
    backbone = families.make(name)
    return lambda: convert_backbone(backbone, "local")


def replace(name):
    backbone = families.make(name)
    return lambda: replace_attention(backbone, "local:window=2")


def generate(task_class, name):
    task = task_class(convert(name)(), preprocessor=None)
    data = families.inputs(families.make(name))
    return lambda: task.generate(data, stop_token_ids=None)


def accelerate_qwen():
    backbone = qwen()
    keras_hub_internals.gated_delta_net_with.cache_clear()
    return lambda: accelerate(backbone)


def read_checkpoint():
    folder = Path(__file__).parents[1] / "data" / "checkpoints" / "gated_deltanet"
    return lambda: EfficientTransformerBackbone.from_preset(str(folder))


GPT2, BART = keras_hub.models.GPT2CausalLM, keras_hub.models.BartSeq2SeqLM
DECODER = keras_hub.layers.TransformerDecoder
# The class or module, the name, and what makes a function that uses it.
KERAS_HUB = [
    (DECODER, "_compute_self_attention_mask", lambda: convert("gpt2")),
    (T5TransformerLayer, "_compute_self_attention_mask", lambda: replace("t5")),
    (GPT2, "_build_cache", lambda: generate(GPT2, "gpt2")),
    (GPT2, "call_with_cache", lambda: generate(GPT2, "gpt2")),
    (BART, "_build_cache", lambda: generate(BART, "bart")),
    (BART, "call_decoder_with_cache", lambda: generate(BART, "bart")),
    (BART, "_initialize_cache", lambda: generate(BART, "bart")),
    (qwen_module, "Qwen3_5GatedDeltaNet", accelerate_qwen),
    (qwen_module, "_chunk_gated_delta_rule", accelerate_qwen),
    (qwen_module, "_recurrent_gated_delta_rule", accelerate_qwen),
    (preset_utils, "get_file", read_checkpoint),
]


@pytest.mark.any_backend
@pytest.mark.parametrize(
    "owner, name, make",
    KERAS_HUB,
    ids=[f"{owner.__name__.split('.')[-1]}-{name}" for owner, name, _ in KERAS_HUB],
)
def test_a_missing_part_of_keras_hub_is_named(monkeypatch, owner, name, make):
    use = make()
    with monkeypatch.context() as patch:
        patch.delattr(owner, name)
        with pytest.raises(MissingAttribute, match=rf"keras_hub .*\.{name}`.*0\.32"):
            use()
    assert use() is not None


@pytest.mark.any_backend
def test_a_missing_module_of_keras_hub_is_named(monkeypatch):
    use = accelerate_qwen()
    monkeypatch.setitem(sys.modules, qwen_module.__name__, None)
    with pytest.raises(
        MissingAttribute, match="src.models.qwen3_5.qwen3_5_gated_delta_net"
    ):
        use()


@pytest.mark.any_backend
@pytest.mark.parametrize(
    "family, name",
    [
        ("llama", "rotary_embedding_layer"),
        ("gemma", "rope_layer"),
        ("gemma3", "logit_soft_cap"),
        ("gemma3", "query_head_dim_normalize"),
        ("t5", "key_value_dim"),
    ],
)
def test_a_missing_attribute_of_an_attention_layer_is_named(family, name):
    backbone = families.make(family)
    for layer in keras_internals.flat_layers(backbone):
        if "Attention" in type(layer).__name__:
            delattr(layer, name)
    with pytest.raises(MissingAttribute, match=rf"Attention\.{name}"):
        replace_attention(backbone, "local:window=2")


@pytest.mark.any_backend
def test_a_missing_attribute_of_a_block_of_qwen_is_named():
    task = accelerate(keras_hub.models.Qwen3_5CausalLM(qwen(), preprocessor=None))
    for block in task.backbone.transformer_layers:
        if block.layer_type == "full_attention":
            del block._self_attention_layer
    tokens = np.ones((1, 4), "int32")
    inputs = {"token_ids": tokens, "padding_mask": tokens * [1, 1, 0, 0]}
    with pytest.raises(MissingAttribute, match="_self_attention_layer"):
        task.generate(inputs, stop_token_ids=None)


@pytest.mark.any_backend
def test_a_call_that_uses_other_rules_is_not_accelerated(monkeypatch):
    use = accelerate_qwen()
    layer_class = qwen_module.Qwen3_5GatedDeltaNet
    monkeypatch.setattr(layer_class, "call", lambda self, hidden_states: hidden_states)
    with pytest.raises(MissingAttribute, match="_chunk_gated_delta_rule"):
        use()


@pytest.mark.any_backend
def test_without_a_list_of_layers_with_lora_the_weights_are_copied(monkeypatch):
    backbone = families.make("gpt2")
    backbone.enable_lora(2)
    families.randomize(backbone)
    del backbone._lora_enabled_layers, backbone._lora_rank
    converted = convert_backbone(backbone, families.LOCAL)
    families.assert_same_outputs(backbone, converted, families.inputs(backbone))
    assert len(keras_internals.lora_variables(converted)) == 8


@pytest.mark.any_backend
@pytest.mark.parametrize("count", [8, 32, 33])
@pytest.mark.parametrize("causal", [False, True])
def test_distances_have_the_buckets_of_t5(causal, count):
    distances = np.arange(-200, 201)
    expected = T5MultiHeadAttention._relative_position_bucket(
        ops.convert_to_tensor(-distances, "int32"),
        bidirectional=not causal,
        num_buckets=count,
    )
    np.testing.assert_array_equal(
        ops.convert_to_numpy(bucket_distances(distances, count, causal)),
        ops.convert_to_numpy(expected),
    )
