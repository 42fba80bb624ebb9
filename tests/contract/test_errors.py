"""Point 9: unsupported arguments raise errors with their name and value."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.layers import attention_names
from keras_efficient_attn.layers.attention.registry import attention_class
from tests.autodiff import to_numpy
from tests.contract.cases import (
    BATCH,
    CASES,
    DIM,
    HEADS,
    KEY_DIM,
    LENGTH,
    inputs,
)
from tests.registered import own_attention_names

pytestmark = pytest.mark.once_a_layer
CONSTRUCTOR = [
    ({"num_heads": 0}, "num_heads=0"),
    ({"key_dim": -1}, "key_dim=-1"),
    ({"value_dim": 0}, "value_dim=0"),
]


def test_every_layer_of_the_package_is_under_contract():
    own, held = own_attention_names(), {case.layer for case in CASES}
    assert len(own) >= 10
    assert not [name for name in own if attention_class(name) not in held]


@pytest.mark.parametrize(
    ("option", "value"), [("sliding_window", 4), ("flash_attention", True)]
)
@pytest.mark.parametrize("name", attention_names())
def test_options_of_softmax_attention(name, option, value):
    """A layer that says so supports them as its own options; the others raise."""
    layer_class = attention_class(name)
    takes = {
        "sliding_window": layer_class.takes_sliding_window,
        "flash_attention": layer_class.takes_flash_attention,
    }
    # The map of elu features by default has no use for a window.
    if takes[option] and name != "linear":
        config = layer_class(HEADS, KEY_DIM, **{option: value}).get_config()
        assert config.get("window", 4) == 4
        return
    with pytest.raises(ValueError, match=f"{option}={value}"):
        layer_class(HEADS, KEY_DIM, **{option: value})


@pytest.mark.parametrize(("options", "message"), CONSTRUCTOR, ids=str)
def test_constructor(case, options, message):
    with pytest.raises(ValueError, match=message):
        case.make(**options)


def test_masks_of_other_shapes(case):
    x, by_keys = inputs(), r"`key_mask`.*attention_mask\.shape=\("
    wrong_keys = "`attention_mask` must have the keys'"
    for name, shape, message in (
        ("attention_mask", (LENGTH, LENGTH), by_keys),
        ("attention_mask", (BATCH, LENGTH, LENGTH), by_keys),
        ("attention_mask", (BATCH, 1, LENGTH, LENGTH), by_keys),
        ("attention_mask", (BATCH, 1, 5), wrong_keys),
        ("attention_mask", (BATCH + 1, 1, LENGTH), wrong_keys),
        ("key_mask", (BATCH, 5), r"key_mask\.shape=\(2, 5\)"),
    ):
        with pytest.raises(ValueError, match=message):
            case.make()(x, x, **{name: np.ones(shape, bool)})


def test_calls_that_do_not_go_with_a_state(causal_case):
    layer, x = causal_case.make(), inputs()
    wrong = dict(use_causal_mask=True, state={"wrong": ops.zeros((BATCH, 1))})
    with pytest.raises(ValueError, match=r"Received: \['wrong'\]"):
        layer(x, x, **wrong)
    state = causal_case.get_initial_state(layer)
    more_rows = causal_case.get_initial_state(layer, BATCH + 1)
    causal = dict(use_causal_mask=True, state=state)
    for value, options, message in (
        (x, dict(causal, state=more_rows), "batch size"),
        (x, dict(state=state), "use_causal_mask=False"),
        (x, dict(causal, return_attention_scores=True), "return_attention_scores"),
        (inputs(length=LENGTH - 1, seed=1), causal, "same length"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(x, value, **options)


def test_a_state_of_other_shapes(causal_case):
    layer, x = causal_case.make(), inputs()
    state = causal_case.get_initial_state(layer)
    name, tensor = next((n, t) for n, t in state.items() if len(t.shape) > 2)
    state[name] = ops.concatenate([tensor, tensor], axis=-1)
    with pytest.raises(ValueError, match=rf"come from this layer.*state\['{name}'\]"):
        layer(x, x, use_causal_mask=True, state=state)


def test_a_state_of_another_kind(causal_case):
    layer, x = causal_case.make(), inputs()
    for name, tensor in causal_case.get_initial_state(layer).items():
        # Floats for integers are cast; see `test_a_state_of_another_dtype_is_cast`.
        other = "bool" if "int" in str(tensor.dtype) else "int32"
        state = causal_case.get_initial_state(layer)
        state[name] = ops.zeros(tensor.shape, other)
        with pytest.raises(ValueError, match=rf"state\['{name}'\].dtype={other}"):
            layer(x, x, use_causal_mask=True, state=state)


def test_symbolic_calls_are_checked_too(case):
    x = keras.KerasTensor((None, LENGTH, DIM))
    mask = keras.KerasTensor((None, LENGTH, LENGTH), dtype="bool")
    with pytest.raises(ValueError, match="attention_mask"):
        case.make()(x, x, attention_mask=mask)


def test_key_and_value_lengths_that_differ(case):
    with pytest.raises(ValueError, match="key_shape"):
        case.make()(inputs(), inputs(length=5), inputs(length=6))
    layer, message = case.built(), "`key` and `value` must have the same length"
    with pytest.raises(ValueError, match=message):
        layer(inputs(), inputs(length=5), inputs(length=6))
    with pytest.raises(ValueError, match=message):
        layer(*(keras.Input((length, DIM)) for length in (LENGTH, 5, 6)))


def test_document_ids(case):
    layer, x = case.built(), inputs()
    kind = dict(use_causal_mask=case.usual)
    ids = np.zeros((BATCH, LENGTH), "int32")
    if not layer.takes_documents:
        with pytest.raises(ValueError, match="cannot keep the documents of a row"):
            layer(x, x, document_ids=ids, **kind)
        return
    listed = layer(x, x, document_ids=ids.tolist(), **kind)
    np.testing.assert_array_equal(
        to_numpy(listed), to_numpy(layer(x, x, document_ids=ids, **kind))
    )
    with pytest.raises(TypeError, match="document_ids.dtype=float32"):
        layer(x, x, document_ids=ids.astype("float32"), **kind)
    with pytest.raises(ValueError, match=r"document_ids.shape=\(2, 36\)"):
        layer(x, x, document_ids=ids[:, 1:], **kind)
    if False in case.causal and not case.shared_key:
        with pytest.raises(ValueError, match="`document_ids` need self-attention"):
            layer(x, inputs(seed=1), document_ids=ids)


def test_a_layer_that_is_causal_says_so(case):
    if False in case.causal or case.plain["use_causal_mask"] is False:
        pytest.skip("the layer also sees later keys")
    with pytest.raises(ValueError, match="call it with use_causal_mask=True"):
        case.built()(inputs(), inputs())
