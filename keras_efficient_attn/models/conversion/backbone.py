"""Backbones of KerasHub with efficient attention: generated classes, and conversion."""

import functools
import inspect
import warnings

import keras
import keras_hub

from keras_efficient_attn.models.conversion.automatic import check_budget, layers_within
from keras_efficient_attn.models.conversion.calibration import (
    batches,
    calibrate_layers,
    can_calibrate,
    check_can_calibrate,
    layer_names,
    recorded_inputs,
)
from keras_efficient_attn.models.conversion.copying import copy_weights
from keras_efficient_attn.models.conversion.lora import counted_as_original
from keras_efficient_attn.models.conversion.places import attention_places, stand_ins
from keras_efficient_attn.models.conversion.replace import chosen, replace_layers
from keras_efficient_attn.models.conversion.specification import (
    of_each_layer,
    recorded,
    with_window,
)
from keras_efficient_attn.models.conversion.stand_ins import StandIn
from keras_efficient_attn.models.conversion.windows import (
    SMALLEST_WINDOW,
    check_window_budget,
    choose_windows,
)
from keras_efficient_attn.models.presets import PresetMixin


def convert_backbone(
    backbone,
    attention,
    layers=None,
    calibrate=None,
    budget=None,
    window_budget=None,
):
    """A copy of a KerasHub backbone with efficient self-attention.

    The copy has the weights of the backbone, under the same paths and in the same
    order, its precision, quantisation and LoRA, and whatever weights the new layers
    have besides; the backbone itself is left as it is. It is an instance of
    `efficient_backbone(type(backbone))`, whose configuration says which attention
    stands where: it saves as `.keras` and as preset, and the tasks of the backbone
    take it, `generate` and `from_preset` included. Import `keras_efficient_attn.models`
    before loading one.

    Works on backbones whose attention is `keras.layers.MultiHeadAttention` or
    KerasHub's `CachedMultiHeadAttention` (BERT, RoBERTa, DistilBERT, ELECTRA, GPT-2,
    OPT, BART, ViT and others), or that of Llama, Qwen 2.5, Mistral or the first Gemma.
    Four things to know:

    - Cross-attention stays as it is, and so does what reads the outputs.
    - A sliding window of the original (Mistral, Qwen) is not kept: the new layer sees
      what its own options, such as `window`, say.
    - Of masks, the new layers read padding and causality. A decoder block that is
      called with a `decoder_attention_mask` refuses it, in eager calls as in compiled
      ones; an attention layer that is itself called, outside its block, takes any
      mask `(batch, length, length)` for a causal one.
    - `generate` keeps KerasHub's cache of keys and values. A token attends for its own
      position only, but the features and codes of all keys in the cache are computed
      anew for each: right, but no faster than the original, with features or codes
      slower, and not in constant time, as an `EfficientCausalLM` is.

    Args:
        backbone: A `keras_hub.models.Backbone`.
        attention: A name with options, such as
            `"performer:window=32,num_features=256"`; a layer, or its configuration as
            `keras.saving.serialize_keras_object` gives it; or a class, for its
            defaults. Of a layer and a configuration, what belongs to the model
            (`num_heads`, `key_dim`, `dropout`, `use_bias`, initialisers, `dtype`, …)
            is not read. By name, `qk_norm` is `False` unless it is named. Or a list of
            these, one for each layer that is replaced, in the order of the model.
        layers: Indices of the self-attention layers to replace, counted from 0
            through the model (in an encoder-decoder, encoder first); others keep
            softmax. `"auto"`: as many as the `budget` allows, those that do least
            harm. Defaults to `None`: all of them.
        calibrate: Data to fit the new layers to, with no training: a batch as the
            backbone takes it, or an iterable of batches (of tuples `(inputs,
            targets)`, the inputs). The backbone runs over them once, and each layer
            that is replaced gets what the original reads there: see `calibrate` of
            `VQAttention` and `PerformerAttention`. A few thousand tokens like those
            to come are enough. Defaults to `None`: nothing is fitted; codes are
            random, and a warning says so.
        budget: For `layers="auto"`: the largest relative error, `√(Σ‖new − old‖² /
            Σ‖old‖²)`, of what leaves the last block of each tower, or of encoder and
            decoder, on the data in `calibrate`.
        window_budget: The largest mean of the layers' windows, a number of at least
            1: each layer gets a window of its own, whatever window `attention` names.
            The windows are powers of two, from a quarter of the budget on to one that
            holds the longest text in `calibrate`. Of all choices within the budget,
            it is the one in which the sum over the layers of `Σ‖new − old‖² /
            Σ‖old‖²` is least, of the output of each layer on what the original reads
            there: of the layers by themselves, so that the output of the model need
            not gain; compare the two. For this the backbone runs over the data twice;
            codes are fitted once, and features, which depend on the window, for each.
            The `attention` of the copy is the list that names the windows. Needs
            `calibrate`, and excludes `layers="auto"`. Defaults to `None`: the windows
            are those that `attention` names.

    Returns:
        The copy; not compiled.

    Raises:
        ValueError: If the backbone's attention cannot be replaced (it adds a bias
            that depends on the distance, or caps its logits, say), or not by
            `attention`; for `layers` that do not exist; if `attention` has nothing to
            calibrate, or no window to choose; if a list of attentions has another
            length than the layers; or if no layer can be replaced within the budget.
        TypeError: If `backbone` or `attention` is of none of these kinds.

    Example:

    ```python
    import keras_hub
    from keras_efficient_attn.models.swap import convert_backbone

    backbone = keras_hub.models.BertBackbone.from_preset("bert_tiny_en_uncased")
    efficient = convert_backbone(backbone, "performer:window=32,num_features=256")
    classifier = keras_hub.models.BertTextClassifier(efficient, num_classes=2)
    ```
    """
    if not isinstance(backbone, keras_hub.models.Backbone):
        raise TypeError(
            "`backbone` must be a `keras_hub.models.Backbone`; for other models see "
            f"`replace_attention`. Received: backbone={backbone!r}"
        )
    if isinstance(backbone, EfficientBackbone):
        raise ValueError(
            "The backbone has been converted already: convert the original. Received: "
            f"{backbone.name}, a {type(backbone).__name__}"
        )
    check_budget(layers, budget, calibrate)
    check_window_budget(window_budget, layers, calibrate)
    attention = recorded(attention)
    inputs = None if calibrate is None else batches(calibrate)
    if isinstance(layers, str) and layers == "auto":
        return _within_budget(backbone, attention, inputs, budget)
    count = len(attention_places(backbone))
    if layers is not None:
        layers = chosen(layers, count)
        count = len(layers)
    attentions = of_each_layer(attention, count)
    if window_budget is not None:
        return _with_windows(backbone, attentions, layers, inputs, window_budget)
    efficient = _converted(backbone, attention, layers)
    new = stand_ins(efficient)
    if inputs is not None:
        check_can_calibrate(new)
        _calibrate(backbone, efficient, inputs)
    elif can_calibrate(new):
        warnings.warn(
            f"{layer_names(new)} can be fitted to data, and is not: pass `calibrate`, "
            "or train the copy.",
            stacklevel=2,
        )
    return efficient


def _within_budget(backbone, attention, inputs, budget):
    """A copy with as many layers replaced as an error allows."""
    whole = _converted(backbone, attention, None)
    fitted = stand_ins(whole)
    if can_calibrate(fitted):
        _calibrate(backbone, whole, inputs)
    layers = layers_within(budget, backbone, whole, inputs)
    if len(layers) == len(fitted):
        return whole
    if isinstance(attention, list):
        attention = [attention[index] for index in layers]
    return _fitted_copy(
        backbone, attention, layers, [fitted[index] for index in layers]
    )


def _with_windows(backbone, attentions, layers, inputs, budget):
    """A copy whose windows have a mean within a budget, and the least error."""
    attentions = [with_window(spec, SMALLEST_WINDOW) for spec in attentions]
    trial = _converted(backbone, attentions, layers)
    fitted = stand_ins(trial)
    places = _replaced_places(backbone, trial)
    windows = choose_windows(budget, backbone, places, fitted, inputs)
    attentions = list(map(with_window, attentions, windows))
    return _fitted_copy(backbone, attentions, layers, fitted)


def _converted(backbone, attention, layers):
    efficient = efficient_backbone(type(backbone)).from_config(
        {**backbone.get_config(), "attention": attention, "attention_layers": layers}
    )
    copy_weights(backbone, efficient)
    return efficient


def _fitted_copy(backbone, attention, layers, fitted):
    """A copy, with weights of layers that have been fitted."""
    efficient = _converted(backbone, attention, layers)
    for layer, source in zip(stand_ins(efficient), fitted, strict=True):
        layer.set_weights(source.get_weights())
    return efficient


def _calibrate(backbone, efficient, inputs):
    places = _replaced_places(backbone, efficient)
    calibrate_layers(stand_ins(efficient), recorded_inputs(backbone, places, inputs))


def _replaced_places(backbone, efficient):
    """The places in the backbone where its copy has stand-ins."""
    new = attention_places(efficient)
    return [
        place
        for place, other in zip(attention_places(backbone), new, strict=True)
        if isinstance(other.layer, StandIn)
    ]


class _BackboneType(type):
    """The type of backbones with efficient attention: each equals its stock class.

    KerasHub finds the tasks, preprocessors and tokenizers of a preset by comparing
    their `backbone_cls` with the class of the preset's backbone. Those of the stock
    class are those of the efficient one.
    """

    def __eq__(cls, other):
        return cls is other or cls.__dict__.get("stock_class") is other

    # Their own: in a set or as keys of a dict, the two are two.
    __hash__ = type.__hash__


class EfficientBackbone(PresetMixin):
    """What the classes that `efficient_backbone` makes add to the stock class.

    Attributes:
        attention: The name or configuration of the attention, or a list of them, one
            for each layer that has it.
        attention_layers: Indices of the layers that have it, or `None` for all.
    """

    def __init__(self, *args, attention, attention_layers=None, **kwargs):
        attention = recorded(attention)
        super().__init__(*args, **kwargs)
        replace_layers(self, attention, attention_layers)
        self.attention = attention
        self.attention_layers = attention_layers

    def get_config(self):
        attention, layers = self.attention, self.attention_layers
        return {
            **super().get_config(),
            "attention": list(attention) if isinstance(attention, list) else attention,
            "attention_layers": None if layers is None else list(layers),
        }

    def enable_lora(self, *args, **kwargs):
        with counted_as_original(self):
            super().enable_lora(*args, **kwargs)

    def save_lora_weights(self, filepath):
        with counted_as_original(self):
            super().save_lora_weights(filepath)

    def load_lora_weights(self, filepath):
        with counted_as_original(self):
            super().load_lora_weights(filepath)


@functools.cache
def efficient_backbone(stock_class):
    """The class of backbones of one kind with efficient attention.

    Its constructor takes the arguments of the stock class, `attention` and
    `attention_layers` (as `layers`), as in `convert_backbone`. The classes of all
    backbones in `keras_hub.models` are registered for serialization when this module
    is imported; call this function to register that of any other backbone before
    loading one.

    Args:
        stock_class: A subclass of `keras_hub.models.Backbone`.

    Returns:
        A subclass of it, registered as `keras_efficient_attn>Efficient{its name}`.

    Raises:
        TypeError: If `stock_class` is something else.
    """
    if not inspect.isclass(stock_class) or not issubclass(
        stock_class, keras_hub.models.Backbone
    ):
        raise TypeError(
            "`stock_class` must be a subclass of `keras_hub.models.Backbone`. "
            f"Received: stock_class={stock_class!r}"
        )
    name = f"Efficient{stock_class.__name__}"
    attributes = {
        "__module__": __name__,
        "__doc__": f"A `{stock_class.__name__}` with efficient self-attention.",
        "stock_class": stock_class,
    }
    made = _BackboneType(name, (EfficientBackbone, stock_class), attributes)
    return keras.saving.register_keras_serializable("keras_efficient_attn")(made)


def _register_all():
    base = keras_hub.models.Backbone
    for stock_class in list(vars(keras_hub.models).values()):
        if not inspect.isclass(stock_class) or stock_class is base:
            continue
        if issubclass(stock_class, base):
            efficient_backbone(stock_class)


_register_all()
