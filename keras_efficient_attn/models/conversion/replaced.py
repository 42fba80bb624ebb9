"""Models whose attention was replaced in place, in files of Keras."""

import copy
import functools
import types

import keras

from keras_efficient_attn.models.conversion.plan import plan_conversion

NAME = "keras_efficient_attn>ReplacedAttention"


class ReplacedAttention:
    """The part of a model with replaced attention that its own class has not.

    Its configuration is that of the model before, and what was put where: the blocks of
    a model make softmax attention of their configuration, and know no other.
    """

    def get_config(self):
        return {"model": self._before.model, "replaced": self._before.replaced}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        # Keras takes parts out of what it reads.
        model = keras.saving.deserialize_keras_object(
            copy.deepcopy(config["model"]), custom_objects=custom_objects
        )
        for options in config["replaced"]:
            plan = plan_conversion(model, options["attention"], options["layers"])
            plan.install(plan.make_adapters())
        return _remember(model, config["model"], config["replaced"])


def serialize(model):
    """The configuration of a model, before its attention is replaced, or `None`.

    Returns:
        A dict; `None` if the model, or a layer in it, has no `get_config`.
    """
    if isinstance(model, ReplacedAttention):
        return model._before.model
    try:
        config = keras.saving.serialize_keras_object(model)
    except NotImplementedError:
        return None
    # The model has to be compiled again.
    config.pop("compile_config", None)
    return config


def remember(model, config, plan):
    """Lets a model with replaced attention save, and load as it is.

    Args:
        model: The model, which gets a subclass of its class.
        config: From `serialized`.
        plan: The `ConversionPlan` of what was replaced.
    """
    before = model._before.replaced if isinstance(model, ReplacedAttention) else []
    options = {"attention": plan.attention, "layers": plan.layers}
    _remember(model, config, [*before, options])


def _remember(model, config, replaced):
    if not isinstance(model, ReplacedAttention):
        model.__class__ = _class_with_memory(type(model))
    # In a namespace, whose dicts Keras does not wrap.
    model._before = types.SimpleNamespace(model=config, replaced=replaced)
    return model


@functools.cache
def _class_with_memory(stock_class):
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
