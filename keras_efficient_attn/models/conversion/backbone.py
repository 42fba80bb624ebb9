"""Backbones of KerasHub with efficient attention: conversion and classes."""

import dataclasses
import functools
import inspect
import warnings

import keras
import keras_hub
from keras import ops

from keras_efficient_attn.layers.keras_internals import (
    flat_layers,
    lora_of,
    own_variables,
    projections,
    set_dtype_policy,
    tracked_layers,
)
from keras_efficient_attn.layers.quantization import KeepsQuantization
from keras_efficient_attn.models.conversion.adapters import AttentionAdapter
from keras_efficient_attn.models.conversion.generation import (
    generate_from_states,
    methods_of_converted,
)
from keras_efficient_attn.models.conversion.layer_search import (
    check_budget,
    select_layers,
)
from keras_efficient_attn.models.conversion.other_functions import (
    warn_of_other_functions,
)
from keras_efficient_attn.models.conversion.targets import choose_targets, is_pattern
from keras_efficient_attn.models.conversion.trace import (
    batches,
    can_fit,
    check_can_fit,
    fit,
    layer_names,
    trace,
)
from keras_efficient_attn.models.files import (
    PicklesAsFile,
    PresetMixin,
    check_lora_file,
)
from keras_efficient_attn.models.keras_hub_internals import (
    copy_lora_state,
    hidden_layers,
)

PACKAGE = "keras_efficient_attn"


def convert_backbone(
    backbone,
    attention,
    layers=None,
    calibrate=None,
    budget=None,
):
    """A copy of a KerasHub backbone with efficient self-attention.

    The copy has the backbone's weights (same paths, same order), precision,
    quantisation and LoRA, and the additional weights of the new layers. The backbone
    itself does not change. The copy is an instance of
    `efficient_backbone(type(backbone))`, whose configuration records the attention of
    each layer. It saves as `.keras` and as preset, and the backbone's tasks accept it,
    including `generate` and `from_preset`. Import `keras_efficient_attn.models` before
    loading one.

    Works on backbones whose attention is `keras.layers.MultiHeadAttention` or
    KerasHub's `CachedMultiHeadAttention` (BERT, RoBERTa, DistilBERT, ELECTRA, GPT-2,
    OPT, BART, Whisper, ViT, DINOv2 and others), or that of Llama, Qwen 2.5 and 3,
    Phi-3, Mistral, Mixtral, the first Gemma, Gemma 3 without images, or T5.
    Six things to know:

    - Cross-attention stays as it is, and so does what reads the outputs.
    - A sliding window of the original (Mistral, Mixtral, Qwen) is not kept: the new
      layer sees what its own options, such as `window`, say.
    - T5's bias by distance counts in the `window` of the new layers, which need one,
      and not beyond. The layers of its encoder, or decoder, are replaced together.
    - With rotary positions, padding between tokens does not count as distance; in the
      original it does. Padding at either end makes no difference.
    - The new layers read only padding and causality from masks. A decoder block that is
      called with a `decoder_attention_mask` raises `ValueError`, in eager and in
      compiled calls. A causal attention layer that nothing around it calls compares
      its mask with causality and padding: another mask raises `ValueError`, and gives
      NaN where a program is compiled. A layer or model of yours that calls it past its
      block has to pass such masks: they are not compared there.
    - `generate` of KerasHub's tasks for GPT-2, OPT, BART, T5, Llama, Mistral, Mixtral,
      Phi-3, Qwen and Gemma carries the states of the new layers in its cache, next to
      the keys and values of the layers that keep softmax. If all layers are replaced by
      layers with a state of constant size, a token costs constant time. For this,
      converting the first backbone of a kind wraps `generate_step` of its tasks, which
      does not affect tasks with other backbones. The methods of these tasks that use a
      cache of keys and values (`call_with_cache`) raise for converted backbones.

    Args:
        backbone: A `keras_hub.models.Backbone`.
        attention: A name with options, such as
            `"performer:window=32,num_features=256"`; a layer, or its configuration from
            `keras.saving.serialize_keras_object`; or a class, for its defaults.
            Arguments that belong to the model (`num_heads`, `key_dim`, `dropout`,
            `use_bias`, initialisers, `dtype`, …) are ignored in a layer and a
            configuration. With a name, `qk_norm` is `False` unless given. Or a list of
            these, one for each layer that is replaced, in the order of the model. Or a
            pattern to repeat over the layers, a dict of names to numbers:
            `{"local:window=128": 5, "full": 1}` replaces five layers, keeps the softmax
            of the sixth, and so on.
        layers: Indices of the self-attention layers to replace, counted from 0 through
            the model (in an encoder-decoder, encoder first). Others keep softmax.
            `"auto"`: as many as the `budget` allows, those with the least error first.
            Defaults to `None`: all layers.
        calibrate: Data to fit the new layers to, without training: a batch of the
            backbone's inputs, or an iterable of batches (from tuples `(inputs,
            targets)`, the inputs are used). The backbone runs over them once, and each
            new layer is fitted to the inputs of the original layer: see `calibrate` of
            `VQAttention` and `PerformerAttention`. A few thousand representative tokens
            are enough. Defaults to `None`: no fitting; codes are random, and a warning
            says so.
        budget: For `layers="auto"`: the largest relative error, `√(Σ‖new − old‖² /
            Σ‖old‖²)`, of the last block's output in each tower, or in encoder and
            decoder, on the data in `calibrate`.

    Returns:
        The copy, not compiled. A warning names layers that do not estimate softmax,
        such as `linear` with elu, and with the weights compute another function. It
        gives `attention` of `swap_report` for the first two of them on 16 random
        tokens, or says why not.

    Raises:
        ValueError: If the backbone's attention cannot be replaced (for example because
            it adds a distance-dependent bias or caps its logits), or not by
            `attention`; for `layers` that do not exist; if `attention` has nothing to
            calibrate; if the list of attentions and the layers differ in length; or if
            no layer can be replaced within the budget.
        TypeError: If `backbone` or `attention` is of another kind.

    Example:

    ```python
    import keras_hub
    from keras_efficient_attn.models import convert_backbone

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
    inputs = None if calibrate is None else batches(calibrate)
    automatic = isinstance(layers, str) and layers == "auto"
    if automatic and is_pattern(attention):
        raise ValueError(
            "A pattern as `attention` already says which layers it replaces: leave out "
            f"layers='auto'. Received: attention={attention!r}"
        )
    targets = choose_targets(backbone, attention, None if automatic else layers)
    if automatic:
        efficient = _within_budget(targets, inputs, budget)
        sites = [
            old
            for old, new in zip(targets.sites, efficient.attention_sites, strict=True)
            if new.is_converted
        ]
        warn_of_other_functions(backbone, sites, efficient.attention_adapters)
        return efficient
    efficient = make_copy(targets)
    adapters = efficient.attention_adapters
    warn_of_other_functions(backbone, targets.chosen_sites, adapters)
    if inputs is not None:
        check_can_fit(adapters)
        fit(
            adapters,
            targets.chosen_sites,
            trace(backbone, targets.chosen_sites, inputs),
        )
    elif can_fit(adapters):
        warnings.warn(
            f"{layer_names(adapters)} can be fitted to data, but was not: pass "
            "`calibrate`, or train the copy.",
            stacklevel=2,
        )
    return efficient


def make_copy(targets, fitted=None):
    """A converted copy of a backbone.

    Args:
        targets: `ConversionTargets` of a `keras_hub.models.Backbone`.
        fitted: Adapters whose own weights the copy takes, or `None`.
    """
    backbone = targets.model
    efficient = efficient_backbone(type(backbone)).from_config(
        {
            **backbone.get_config(),
            "attention": targets.attention,
            "attention_layers": targets.layers,
        }
    )
    copy_weights(backbone, efficient)
    if fitted is not None:
        for adapter, source in zip(efficient.attention_adapters, fitted, strict=True):
            adapter.attention.set_weights(source.attention.get_weights())
    return efficient


def _within_budget(targets, inputs, budget):
    """A copy with as many layers replaced as an error budget allows."""
    if targets.shared_stacks:
        raise ValueError(
            "layers='auto' chooses single layers, but the layers of a stack of "
            f"{targets.model.name} must be replaced together: pass their indices as "
            "`layers`, or None for all. Received: layers='auto', stacks "
            f"{targets.shared_stacks}"
        )
    whole = make_copy(targets)
    fitted = whole.attention_adapters
    if can_fit(fitted):
        fit(fitted, targets.sites, trace(targets.model, targets.sites, inputs))
    layers = select_layers(budget, targets, whole, inputs)
    if len(layers) == len(fitted):
        return whole
    attention = targets.attention
    if isinstance(attention, list):
        attention = [attention[index] for index in layers]
    chosen = dataclasses.replace(targets, attention=attention, layers=layers)
    return make_copy(chosen, [fitted[index] for index in layers])


class EfficientBackbone(PicklesAsFile, KeepsQuantization, PresetMixin):
    """The part of a converted backbone that the stock class lacks.

    Attributes:
        attention: The name or configuration of the attention, or a list of them, one
            for each converted layer.
        attention_layers: Indices of the converted layers, or `None` for all.
        attention_sites: The `AttentionSite`s of all self-attention layers.
    """

    def __init__(self, *args, attention, attention_layers=None, **kwargs):
        super().__init__(*args, **kwargs)
        targets = choose_targets(self, attention, attention_layers)
        self.attention_sites = targets.install(targets.make_adapters())
        self.attention = targets.attention
        self.attention_layers = attention_layers

    @classmethod
    def from_checkpoint(cls, preset, config, load_weights, **kwargs):
        """Raises `ValueError`: a checkpoint of transformers has stock attention."""
        raise ValueError(
            f"{cls.__name__} loads what `save_to_preset` wrote, and no checkpoint of "
            "transformers: load that by `keras_hub.models.Backbone.from_preset`, and "
            "pass the backbone to `convert_backbone` with an `attention`. Received: "
            f"preset={preset!r}, with model_type={config['model_type']!r}"
        )

    @property
    def attention_adapters(self):
        """The `AttentionAdapter`s, in the order of the model."""
        return [site.layer for site in self.attention_sites if site.is_converted]

    def get_config(self):
        attention, layers = self.attention, self.attention_layers
        return {
            **super().get_config(),
            "attention": list(attention) if isinstance(attention, list) else attention,
            "attention_layers": None if layers is None else list(layers),
        }

    def enable_lora(self, *args, **kwargs):
        with hide_adapter_weights(self, self.attention_sites):
            super().enable_lora(*args, **kwargs)

    def save_lora_weights(self, filepath):
        with hide_adapter_weights(self, self.attention_sites):
            super().save_lora_weights(filepath)

    def load_lora_weights(self, filepath):
        check_lora_file(filepath)
        with hide_adapter_weights(self, self.attention_sites):
            super().load_lora_weights(filepath)


@functools.cache
def efficient_backbone(stock_class):
    """The class of backbones of one kind with efficient attention.

    Its constructor takes the arguments of the stock class, `attention` and
    `attention_layers` (as `layers`), as in `convert_backbone`. The class is created on
    first use. A file with a converted backbone from `keras_hub.models` loads once
    `keras_efficient_attn.models` is imported. For another backbone, call this function
    before loading.

    Args:
        stock_class: A subclass of `keras_hub.models.Backbone`.

    Returns:
        A subclass of it, with the registered name
        `keras_efficient_attn>Efficient{its name}`.

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
    attributes = {
        "__module__": __name__,
        "__doc__": f"A `{stock_class.__name__}` with efficient self-attention.",
    }
    entry = RegistryEntry(stock_class)
    made = type(entry.__name__, (EfficientBackbone, stock_class), attributes)
    keras.saving.register_keras_serializable(PACKAGE)(made)
    entry.register()
    generate_from_states(stock_class, functools.partial(methods_of_converted, made))
    return made


class RegistryEntry:
    """An entry of Keras' registry that creates the class when a file names it.

    KerasHub checks whether the class in a preset is a `Backbone`, and finds tasks,
    preprocessors and tokenizers by comparing their `backbone_cls` with it. So the entry
    is a subclass of the stock class and compares equal to it.

    Args:
        stock_class: A subclass of `keras_hub.models.Backbone`.
    """

    def __init__(self, stock_class):
        self.stock_class = stock_class
        self.__name__ = f"Efficient{stock_class.__name__}"

    @property
    def __bases__(self):
        # `issubclass` reads this attribute of objects that are not classes.
        return (efficient_backbone(self.stock_class),)

    def __eq__(self, other):
        return other is self.stock_class or other is self

    # A separate hash: in a set, the entry and the stock class are distinct.
    __hash__ = object.__hash__

    def from_config(self, config):
        return efficient_backbone(self.stock_class).from_config(config)

    def register(self):
        """Puts the entry into the registry, under the name of the class."""
        name = f"{PACKAGE}>{self.__name__}"
        keras.saving.get_custom_objects()[name] = self


def copy_weights(source, target):
    """Copies weights, LoRA and trainable flags.

    Args:
        source: A backbone.
        target: A backbone of the same configuration, with adapters instead of some
            attention layers. Their own weights do not change.
    """
    for old, new in _pairs(source, target):
        if isinstance(new.dtype_policy, keras.dtype_policies.DTypePolicyMap):
            # Keras cannot save quantised layers that hold the whole policy map.
            set_dtype_policy(new, old.dtype_policy)
        lora = lora_of(old)
        if lora is not None and lora_of(new) is None:
            rank, alpha = lora
            new.enable_lora(rank, lora_alpha=alpha)
        if new.trainable != old.trainable:
            new.trainable = old.trainable
    for old, new in _pairs(source, target):
        variables = zip(own_variables(old), own_variables(new), strict=True)
        for old_variable, new_variable in variables:
            # On JAX a training step donates the buffers of its weights.
            new_variable.assign(ops.copy(old_variable))
            new_variable.trainable = old_variable.trainable
    copy_lora_state(source, target)


def _pairs(old, new):
    """Pairs of corresponding layers of two models, outermost first."""
    yield old, new
    if isinstance(new, AttentionAdapter):
        children = zip(
            projections(old).values(), projections(new).values(), strict=True
        )
    else:
        children = zip(tracked_layers(old), tracked_layers(new), strict=True)
    for pair in children:
        yield from _pairs(*pair)


def hide_adapter_weights(model, sites):
    """Context that hides a converted backbone's additional layers.

    KerasHub numbers layers with LoRA among all layers with weights. Efficient attention
    adds such layers, for example codebooks.

    Args:
        model: A converted backbone.
        sites: Its `AttentionSite`s.

    Returns:
        A context manager.
    """
    hidden = []
    for adapter in (site.layer for site in sites if site.is_converted):
        kept = {
            id(layer)
            for projection in projections(adapter).values()
            for layer in flat_layers(projection)
        }
        hidden += [x for x in flat_layers(adapter)[1:] if id(x) not in kept]
    return hidden_layers(model, hidden)


def _register_entries():
    base = keras_hub.models.Backbone
    for stock_class in list(vars(keras_hub.models).values()):
        if not inspect.isclass(stock_class) or stock_class is base:
            continue
        if issubclass(stock_class, base):
            RegistryEntry(stock_class).register()


_register_entries()
