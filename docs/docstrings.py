"""Prepares docstrings and signatures for the pages of the API."""

import ast
import re

import griffe

# Matches from a prompt to the next empty line.
EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.M)
CALL_ARGUMENTS = re.compile(r"^Call arguments:\n(.*?)^Returns:", re.M | re.S)
BASE = "layers.attention.base.EfficientAttention"
KERAS_OWN = "keras.src.layers.attention.multi_head_attention"
VARIADIC = (griffe.ParameterKind.var_positional, griffe.ParameterKind.var_keyword)


class Examples(griffe.Extension):
    """Makes code blocks of the examples in docstrings."""

    def on_object(self, *, obj, **kwargs):
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(
                lambda match: f"```pycon\n{match[0]}\n```", obj.docstring.value
            )


class Layers(griffe.Extension):
    """Gives attention layers the arguments of their base classes, as at run time.

    The signature has those of the constructor; the docstring of a layer gets the
    section of the call arguments that all layers share.
    """

    def on_package(self, *, pkg, loader, **kwargs):
        keras_layer = griffe.load(KERAS_OWN)["MultiHeadAttention"]
        base = pkg[BASE]
        shared = CALL_ARGUMENTS.search(base.docstring.value)[1]
        layers = [
            (layer, [layer, *(x for x in layer.mro() if x.path.startswith(pkg.path))])
            for layer in classes(pkg)
        ]
        layers = [(layer, bases) for layer, bases in layers if base in bases]
        # All are read before one is changed.
        signatures = [merge(own_arguments(keras_layer), bases) for _, bases in layers]
        for (layer, _), signature in zip(layers, signatures, strict=True):
            if "__init__" in layer.members:
                layer.members["__init__"].parameters = signature
            if layer is not base and layer.docstring:
                layer.docstring.value = layer.docstring.value.replace(
                    "\nReturns:\n",
                    f"\nCall arguments of all layers:\n{shared}\nReturns:\n",
                    1,
                )


def classes(module):
    """The classes of a module and those inside it, aliases aside."""
    for member in module.members.values():
        if member.is_alias:
            continue
        if member.is_module:
            yield from classes(member)
        elif member.is_class:
            yield member


def own_arguments(layer):
    """Dict of the named parameters of a class' own constructor."""
    if "__init__" not in layer.members:
        return {}
    _, *parameters = layer.members["__init__"].parameters
    return {p.name: p for p in parameters if p.kind not in VARIADIC}


def refused(bases):
    """The `refused_arguments` of the first class that has them, a tuple of names."""
    for base in bases:
        if "refused_arguments" in base.members:
            return ast.literal_eval(str(base.members["refused_arguments"].value))
    return ()


def merge(keras_own, bases):
    """The parameters of a class from those of the classes in its `bases`, in order."""
    own = {}
    for base in bases:
        for name, parameter in own_arguments(base).items():
            if name not in keras_own:
                own.setdefault(
                    name,
                    griffe.Parameter(
                        name,
                        kind=griffe.ParameterKind.keyword_only,
                        default=parameter.default,
                    ),
                )
    for name in refused(bases):
        own.pop(name, None)
    rest = griffe.Parameter("kwargs", kind=griffe.ParameterKind.var_keyword)
    return griffe.Parameters(*keras_own.values(), *own.values(), rest)
