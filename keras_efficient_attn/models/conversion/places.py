"""Finding the attention layers of a model, and putting others in their places."""

import collections
import contextlib
import dataclasses

import keras
import keras_hub

from keras_efficient_attn.models.conversion.stand_ins import (
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
# Blocks of KerasHub around the layers in `STAND_INS`: they make one mask of causality
# and padding, and, where they are called with it, of `decoder_attention_mask`.
CAUSAL_BLOCKS = (
    "GemmaDecoderBlock",
    "LlamaTransformerDecoder",
    "MistralTransformerDecoder",
    "QwenTransformerDecoder",
)
# Blocks of KerasHub that give `MultiHeadAttention` masks which differ between queries
# and are not causality and padding, by the names of their modules and classes.
REFUSED_BLOCKS = (
    "edrec_layers.EdRecDecoderBlock",
    "parseq_decoder.PARSeqDecoderBlock",
    "sam3_text_encoder.CLIPEncoderLayer",
)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an attention layer stands in a model.

    Attributes:
        holders: The layers that hold it, a tuple; mostly one.
        layer: The attention layer.
        stand_in: The class of `stand_ins` that can stand there.
        is_causal: Whether the holders pass masks that hide later keys.
        block: The largest layer around it that holds no other attention layer that
            can be replaced: what leaves it is the residual stream.
    """

    holders: tuple
    layer: keras.layers.Layer
    stand_in: type
    is_causal: bool
    block: keras.layers.Layer


def attention_places(model):
    """The places of the self-attention layers that can be replaced, in their order.

    Stand-ins among them: they can be replaced again.

    Args:
        model: A built model or layer.

    Raises:
        ValueError: If there is none, or the model has attention of another kind.
    """
    found, others = [], []
    holders_of = _holders(model)
    for layer, holders in list(holders_of.values())[1:]:
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
            if not any(_is_cross_attention(holder, layer) for holder in holders):
                found.append((layer, stand_in, holders))
        elif "Attention" in name:
            others.append(name)
    if not found:
        names = ", ".join(dict.fromkeys(others)) or "none"
        raise ValueError(
            "There is no self-attention layer that can be replaced: known are "
            "MultiHeadAttention, CachedMultiHeadAttention, "
            f"{', '.join(STAND_INS)}. Found in {model.name}: {names}"
        )
    around = [_layers_around(layer, holders_of) for layer, _, _ in found]
    number = collections.Counter(id(layer) for layers in around for layer in layers)
    return [
        Place(
            tuple(holders),
            layer,
            stand_in,
            _is_causal(model, layer, stand_in, holders),
            next((v for v in reversed(layers) if number[id(v)] == 1), holders[0]),
        )
        for (layer, stand_in, holders), layers in zip(found, around, strict=True)
    ]


def stand_ins(model):
    """The efficient layers that stand in the places of a model's own, in order."""
    layers = [place.layer for place in attention_places(model)]
    return [layer for layer in layers if isinstance(layer, StandIn)]


def check_held(place):
    """Raises `ValueError` if the layer is held in a way that is not known."""
    for holder in place.holders:
        in_graph = isinstance(holder, keras.Function)
        if not in_graph and not _attributes_with(holder, place.layer):
            raise ValueError(
                f"{holder.name} does not hold its attention layer as an attribute, "
                "or in a list, tuple or dict that is one. Received: "
                f"{place.layer.path}"
            )


def put(place, layer):
    """Puts a layer that is built where another one stands, which `check_held` knows."""
    for holder in place.holders:
        _put_into(holder, place.layer, layer)
        if place.is_causal and not isinstance(place.layer, StandIn):
            _refuse_other_masks(holder)


def _put_into(parent, old, layer):
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


def _refuse_other_masks(block):
    """Lets a decoder block refuse a mask that is not causality and padding.

    The block makes one mask of all, in which its attention layer could not tell.
    """
    make_mask = getattr(block, "_compute_self_attention_mask", None)
    if make_mask is None:
        return

    def checked(*, decoder_attention_mask=None, **arguments):
        if decoder_attention_mask is not None:
            raise ValueError(
                "Efficient attention cannot apply a mask that differs between "
                "queries, but for causality. Pass a mask over keys as "
                "`decoder_padding_mask`. Received: decoder_attention_mask.shape="
                f"{tuple(decoder_attention_mask.shape)}, in {block.name}"
            )
        return make_mask(decoder_attention_mask=None, **arguments)

    block._compute_self_attention_mask = checked


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
    """Whether queries and keys are different sequences.

    By its name, and by the lengths that it is called with in a Functional model.
    """
    if any(_of_two_lengths(node.arguments) for node in layer._inbound_nodes):
        return True
    names = [*layer.path.split("/"), *_attributes_with(parent, layer)]
    return "Pooling" in type(parent).__name__ or any("cross" in name for name in names)


def _of_two_lengths(arguments):
    named = dict(zip(("query", "value"), arguments.args, strict=False))
    named.update(arguments.kwargs)
    query, value = named.get("query"), named.get("value")
    lengths = {t.shape[1] for t in (query, value) if t is not None}
    return len(lengths - {None}) > 1


def _stand_in(layer):
    if isinstance(layer, StandIn):
        return type(layer).__bases__[0]
    # Subclasses may compute something else.
    if type(layer) in MULTI_HEAD:
        return MultiHeadStandIn
    if type(layer).__module__.split(".")[0] == "keras_hub":
        return STAND_INS.get(type(layer).__name__)
    return None


def _is_causal(model, layer, stand_in, holders):
    """Whether those that hold an attention layer pass it masks that hide later keys.

    Raises:
        ValueError: If they pass other masks that differ between queries, or may.
    """
    kinds = set()
    for holder in holders:
        kind = type(holder)
        name = f"{kind.__module__.rsplit('.', 1)[-1]}.{kind.__name__}"
        decoder = isinstance(holder, keras_hub.layers.TransformerDecoder)
        unknown = stand_in.receives_causal_mask and kind.__name__ not in CAUSAL_BLOCKS
        if name in REFUSED_BLOCKS or unknown or (decoder and _has_own_masks(kind)):
            raise ValueError(
                "The attention of this model cannot be replaced: its block passes "
                "masks that differ between queries, or may, and are not causality "
                f"and padding. Received: {model.name}, with a {kind.__name__}"
            )
        kinds.add(decoder or stand_in.receives_causal_mask)
    if len(kinds) > 1:
        names = ", ".join(type(holder).__name__ for holder in holders)
        raise ValueError(
            "The attention of this model cannot be replaced: a layer is held by "
            "blocks of which some are causal and others are not. Received: "
            f"{layer.path}, in {names}"
        )
    return kinds.pop()


def _has_own_masks(kind):
    """Whether a subclass of KerasHub's decoder may make masks in its own way."""
    decoder = keras_hub.layers.TransformerDecoder
    names = ("call", "_compute_self_attention_mask")
    return any(getattr(kind, name) is not getattr(decoder, name) for name in names)


def _holders(model):
    """All layers below one, from first to last, and the layers that hold them.

    Returns:
        Dict of pairs `(layer, holders)` by the layers' ids, the model first.
    """
    found = {id(model): (model, [])}

    def visit(layer):
        # The layers of a functional model are in the order of its graph.
        children = layer.layers if isinstance(layer, keras.Model) else []
        for child in [*children, *layer._layers]:
            if id(child) not in found:
                found[id(child)] = (child, [layer])
                visit(child)
            elif child is not model:
                holders = found[id(child)][1]
                if all(holder is not layer for holder in holders):
                    holders.append(layer)

    visit(model)
    return found


def _layers_around(layer, holders_of):
    """The layer that holds one, and those around it that are no models, inside out."""
    around = []
    while True:
        layer = holders_of[id(layer)][1][0]
        outermost = isinstance(layer, keras.Model) or not holders_of[id(layer)][1]
        if around and outermost:
            return around
        around.append(layer)
        if outermost:
            return around


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
