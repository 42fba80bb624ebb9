"""Replaces the attention layers of a model in place, and in its files."""

import copy
import functools
import types
import warnings

import keras

from keras_efficient_attn.layers.quantization import KeepsQuantization
from keras_efficient_attn.models.conversion.other_functions import (
    warn_of_other_functions,
)
from keras_efficient_attn.models.conversion.targets import (
    build_adapter,
    choose_targets,
)
from keras_efficient_attn.models.conversion.trace import (
    batches,
    check_can_fit,
    fit,
    trace,
)
from keras_efficient_attn.models.files import PicklesAsFile

NAME = "keras_efficient_attn>ReplacedAttention"


def replace_attention(model, attention, layers=None, calibrate=None):
    """Replaces self-attention layers of a built model, in the model itself.

    For any Keras model that holds `keras.layers.MultiHeadAttention`, as an attribute
    of a layer, in a list or dict that is one, or in a functional graph; and for
    KerasHub's `CachedMultiHeadAttention` and the grouped-query attention of Llama,
    Qwen 2.5 and 3, Phi-3, Mistral, Mixtral, the first Gemma and Gemma 3 without images,
    or the attention of T5.
    The new layers take over the projections as they stand, and read padding and
    causality of masks, as in `convert_backbone`.
    Cross-attention stays: layers whose name says so, and in a functional graph those
    that are called with queries and values of different lengths.

    The model has to be compiled again. It saves, and loads with its new attention
    once `keras_efficient_attn.models` is imported: its class becomes a subclass that
    writes the original configuration, and what was replaced. That holds for the
    model that is passed, or a model around it, and not for a layer or block of it that
    is saved alone. A model without `get_config`, which Keras cannot load either, does
    not. `trainable` of its layers is saved as it was before. `keras.models.clone_model`
    makes the original attention; `type(model).from_config(model.get_config())` the new
    one.

    Args:
        model: A built model or layer.
        attention: As for `convert_backbone`.
        layers: Indices, as for `convert_backbone`.
        calibrate: As for `convert_backbone`.

    Returns:
        The paths of the layers that were replaced, a list of strings. A warning names
        layers that do not estimate softmax, as for `convert_backbone`.

    Raises:
        ValueError: If the model holds no such layer, or `attention` cannot replace one
            of them; the model is then unchanged.
        TypeError: If `attention` is of another kind.

    Example:

    ```python
    import keras
    from keras_efficient_attn.models import replace_attention

    inputs = keras.Input((None, 16))
    attention = keras.layers.MultiHeadAttention(num_heads=2, key_dim=8)
    attended = attention(inputs, inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(attended))
    replace_attention(model, "local:window=64")
    model.compile("adam", "mse")
    ```
    """
    targets = choose_targets(model, attention, layers)
    # Build all before installing any: an error then leaves the model unchanged.
    adapters = targets.make_adapters()
    before = serialize(model)
    if calibrate is not None:
        check_can_fit(adapters)
        records = trace(model, targets.chosen_sites, batches(calibrate))
    for adapter, site in zip(adapters, targets.chosen_sites, strict=True):
        build_adapter(adapter, site)
    if calibrate is not None:
        fit(adapters, targets.chosen_sites, records)
    warn_of_other_functions(model, targets.chosen_sites, adapters)
    targets.install(adapters)
    message = f"{model.name} must be compiled again."
    if before is None:
        message += " It cannot be saved and loaded, because it, or a layer in it, has "
        message += "no `get_config`."
    else:
        record_replacement(model, before, targets)
    warnings.warn(message, stacklevel=2)
    return [adapter.path for adapter in adapters]


class ReplacedAttention(PicklesAsFile, KeepsQuantization):
    """The part of a model with replaced attention that its own class has not.

    Its configuration is that of the model before, and what was put where: the blocks of
    a model make softmax attention of their configuration, and know no other.
    """

    def get_config(self):
        return {"model": self._record.model, "replaced": self._record.replaced}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        # Keras takes parts out of what it reads.
        model = keras.saving.deserialize_keras_object(
            copy.deepcopy(config["model"]), custom_objects=custom_objects
        )
        for options in config["replaced"]:
            targets = choose_targets(model, options["attention"], options["layers"])
            targets.install(targets.make_adapters())
        return _set_record(model, config["model"], config["replaced"])


def serialize(model):
    """The configuration of a model, before its attention is replaced, or `None`.

    Returns:
        A dict; `None` if the model, or a layer in it, has no `get_config`.
    """
    if isinstance(model, ReplacedAttention):
        return model._record.model
    try:
        config = keras.saving.serialize_keras_object(model)
    except NotImplementedError:
        return None
    # The model has to be compiled again.
    config.pop("compile_config", None)
    return config


def record_replacement(model, config, targets):
    """Lets a model with replaced attention save, and load as it is.

    Args:
        model: The model, which gets a subclass of its class.
        config: From `serialized`.
        targets: The `ConversionTargets` that were replaced.
    """
    before = model._record.replaced if isinstance(model, ReplacedAttention) else []
    options = {"attention": targets.attention, "layers": targets.layers}
    _set_record(model, config, [*before, options])


def _set_record(model, config, replaced):
    if not isinstance(model, ReplacedAttention):
        model.__class__ = _class_with_record(type(model))
    # In a namespace, whose dicts Keras does not wrap.
    model._record = types.SimpleNamespace(model=config, replaced=replaced)
    return model


@functools.cache
def _class_with_record(stock_class):
    """A subclass whose instances serialise under one name, whatever the class."""
    attributes = {"__module__": __name__, "__doc__": stock_class.__doc__}
    bases = (ReplacedAttention, stock_class)
    made = type(stock_class.__name__, bases, attributes)
    package, name = NAME.split(">")
    keras.saving.register_keras_serializable(package, name)(made)
    _register()
    return made


def _register():
    # A file names the same class for all of them: the class that makes them.
    keras.saving.get_custom_objects()[NAME] = ReplacedAttention


_register()
