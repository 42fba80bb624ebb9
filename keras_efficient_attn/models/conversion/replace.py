"""Replaces the attention layers of a model in place."""

import warnings

from keras_efficient_attn.models.conversion.fit import batches, check_can_fit, fit
from keras_efficient_attn.models.conversion.plan import build_adapter, plan_conversion
from keras_efficient_attn.models.conversion.trace import trace


def replace_attention(model, attention, layers=None, calibrate=None):
    """Replaces self-attention layers of a built model, in the model itself.

    Works on any Keras model with `keras.layers.MultiHeadAttention` as an attribute of a
    layer, in such a list or dict, or in a functional graph, and on KerasHub's
    `CachedMultiHeadAttention` and the grouped-query attention of Llama, Qwen 2.5 and 3,
    Phi-3, Mistral, Mixtral and the first Gemma. The new layers take over the
    projections, and read padding and causality from masks, as in `convert_backbone`.
    Cross-attention stays: layers whose name says so and, in a functional graph, layers
    called with queries and values of different lengths.

    The model has to be compiled again. The conversion **does not survive saving**: the
    blocks' configurations still describe softmax attention, so a loaded model has
    softmax attention. For a backbone of KerasHub, `convert_backbone` makes a copy that
    can be saved.

    Args:
        model: A built model or layer.
        attention: As for `convert_backbone`.
        layers: Indices, as for `convert_backbone`.
        calibrate: As for `convert_backbone`.

    Returns:
        The paths of the layers that were replaced, a list of strings.

    Raises:
        ValueError: If the model holds no such layer, or `attention` cannot replace one
            of them; the model is then unchanged.
        TypeError: If `attention` is of another kind.

    Example:

    ```python
    inputs = keras.Input((None, 16))
    attended = keras.layers.MultiHeadAttention(2, 8)(inputs, inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(attended))
    replace_attention(model, "local:window=64")
    model.compile("adam", "mse")
    ```
    """
    plan = plan_conversion(model, attention, layers)
    # Build all before installing any: an error then leaves the model unchanged.
    adapters = plan.make_adapters()
    if calibrate is not None:
        check_can_fit(adapters)
        records = trace(model, plan.selected, batches(calibrate))
        for adapter, site in zip(adapters, plan.selected, strict=True):
            build_adapter(adapter, site)
        fit(adapters, plan.selected, records)
    plan.install(adapters)
    warnings.warn(
        f"{model.name} has to be compiled again, and does not survive saving: what is "
        "loaded has softmax attention. `convert_backbone` makes a copy of a backbone "
        "that does.",
        stacklevel=2,
    )
    return [adapter.path for adapter in adapters]
