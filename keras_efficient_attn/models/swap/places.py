"""Finding the attention layers of a model, and putting others in their places."""

import contextlib
import dataclasses

import keras
import keras_hub

from keras_efficient_attn.models.swap.stand_ins import (
    GemmaStandIn,
    MistralStandIn,
    MultiHeadStandIn,
    RotaryStandIn,
    StandIn,
)

MULTI_HEAD = (
    keras.layers.MultiHeadAttention,
    keras_hub.layers.CachedMultiHeadAttention,
)
# KerasHub's own attention layers, which it does not export, by the name of the class.
STAND_INS = {
    "LlamaAttention": RotaryStandIn,
    "QwenAttention": RotaryStandIn,
    "CachedMistralAttention": MistralStandIn,
    "CachedGemmaAttention": GemmaStandIn,
}
_DISTANCE = "adds a bias that depends on the distance to its logits"
REFUSED = {
    "BloomAttention": _DISTANCE,
    "DisentangledSelfAttention": "adds logits of content and relative position",
    "FalconAttention": _DISTANCE,
    "T5MultiHeadAttention": _DISTANCE,
    "TwoStreamRelativeAttention": "adds logits of content and relative position",
}
# Blocks of KerasHub that give `MultiHeadAttention`, or Gemma's attention, masks which
# differ between queries and are not causality and padding.
_MASKS = "its block passes masks that differ between queries"
REFUSED_BLOCKS = {
    "CLIPEncoderLayer": _MASKS,
    "EdRecDecoderBlock": _MASKS,
    "PARSeqDecoderBlock": _MASKS,
    "PaliGemmaDecoderBlock": _MASKS,
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an attention layer stands in a model.

    Attributes:
        parent: The layer that holds it.
        layer: The attention layer.
        stand_in: The class of `stand_ins` that can stand there.
        is_causal: Whether the parent passes masks that hide later keys.
    """

    parent: keras.layers.Layer
    layer: keras.layers.Layer
    stand_in: type
    is_causal: bool


def attention_places(model):
    """The places of the self-attention layers that can be replaced, in their order.

    Stand-ins among them: they can be replaced again.

    Args:
        model: A built model or layer.

    Raises:
        ValueError: If there is none, or the model has attention of another kind.
    """
    places, others = [], []
    for parent, layer in _parents_and_children(model):
        name = type(layer).__name__
        if name in REFUSED:
            raise ValueError(
                f"The attention of this model cannot be replaced: {name} "
                f"{REFUSED[name]}, and efficient attention never forms the logits of "
                f"all queries by all keys. Received: {model.name}"
            )
        stand_in = _stand_in(layer)
        if stand_in is not None:
            if not layer.built:
                raise ValueError(
                    "The model must be built, or called once, before its attention "
                    f"is replaced. Received: {name} {layer.name!r}, built=False"
                )
            if _is_cross_attention(parent, layer):
                continue
            reason = REFUSED_BLOCKS.get(type(parent).__name__)
            if reason is not None:
                raise ValueError(
                    f"The attention of this model cannot be replaced: {reason}. "
                    f"Received: {model.name}, with a {type(parent).__name__}"
                )
            decoder = isinstance(parent, keras_hub.layers.TransformerDecoder)
            is_causal = decoder or stand_in.receives_causal_mask
            places.append(Place(parent, layer, stand_in, is_causal))
        elif "Attention" in name:
            others.append(name)
    if places:
        return places
    found = ", ".join(dict.fromkeys(others)) or "none"
    raise ValueError(
        "There is no self-attention layer that can be replaced: known are "
        "MultiHeadAttention, CachedMultiHeadAttention, "
        f"{', '.join(STAND_INS)}. Found in {model.name}: {found}"
    )


def stand_ins(model):
    """The efficient layers that stand in the places of a model's own, in order."""
    layers = [place.layer for place in attention_places(model)]
    return [layer for layer in layers if isinstance(layer, StandIn)]


def check_held(place):
    """Raises `ValueError` if the parent holds the layer in a way that is not known."""
    in_graph = isinstance(place.parent, keras.Function)
    if not in_graph and not _attributes_with(place.parent, place.layer):
        raise ValueError(
            f"{place.parent.name} does not hold its attention layer as an attribute, "
            "or in a list, tuple or dict that is one. Received: "
            f"{place.layer.path}"
        )


def put(place, layer):
    """Puts a layer that is built where another one stands, which `check_held` knows."""
    old, parent = place.layer, place.parent
    attributes = _attributes_with(parent, old)
    parent._tracker.replace_tracked_value("layers", old, layer)
    for name, value in attributes.items():
        if value is old:
            setattr(parent, name, layer)
        elif isinstance(value, tuple):
            setattr(parent, name, tuple(layer if v is old else v for v in value))
        else:
            _put_in_collection(value, old, layer)
    if isinstance(parent, keras.Function):
        _put_in_graph(parent, old, layer)


def _attributes_with(parent, layer):
    """The attributes that are a layer, or a collection that holds it."""
    # On PyTorch, layers are among the `_modules`.
    attributes = {**vars(parent), **vars(parent).get("_modules", {})}
    # Keras' own list of them, however they are held.
    attributes.pop("_layers", None)
    found = {}
    for name, value in attributes.items():
        held = value.values() if isinstance(value, dict) else value
        if value is layer or (
            isinstance(value, list | tuple | dict) and any(v is layer for v in held)
        ):
            found[name] = value
    return found


def name_scopes(path):
    """Scopes in which a layer has a path: those of its parents."""
    stack = contextlib.ExitStack()
    for name in path.split("/")[:-1]:
        stack.enter_context(keras.name_scope(name))
    return stack


def track_parameters(model):
    """Lets PyTorch know of variables that were added to a built model."""
    if keras.backend.backend() == "torch":
        for layer in model._flatten_layers():
            layer._track_variables()


def _is_cross_attention(parent, layer):
    """Whether queries and keys are different sequences, by what it is called."""
    names = [*layer.path.split("/"), *_attributes_with(parent, layer)]
    return "Pooling" in type(parent).__name__ or any("cross" in name for name in names)


def _stand_in(layer):
    if isinstance(layer, StandIn):
        return type(layer).__bases__[0]
    # Subclasses may compute something else.
    if type(layer) in MULTI_HEAD:
        return MultiHeadStandIn
    if type(layer).__module__.split(".")[0] == "keras_hub":
        return STAND_INS.get(type(layer).__name__)
    return None


def _parents_and_children(layer, seen=None):
    """All layers below one, with the layers that hold them, from first to last."""
    seen = {id(layer)} if seen is None else seen
    # The layers of a functional model are in the order of its graph.
    children = layer.layers if isinstance(layer, keras.Model) else []
    for child in [*children, *layer._layers]:
        if id(child) not in seen:
            seen.add(id(child))
            yield layer, child
            yield from _parents_and_children(child, seen)


def _put_in_collection(collection, old, new):
    keys = range(len(collection)) if isinstance(collection, list) else list(collection)
    for key in keys:
        if collection[key] is old:
            collection[key] = new


def _put_in_graph(model, old, new):
    """Puts a layer in the graph of a functional model."""
    new._inbound_nodes = old._inbound_nodes
    new._outbound_nodes = old._outbound_nodes
    for node in old._inbound_nodes:
        node.operation = new
        for tensor in node.outputs:
            tensor._keras_history = tensor._keras_history._replace(operation=new)
    for operations in model._operations_by_depth.values():
        _put_in_collection(operations, old, new)
