"""Finds the self-attention layers of a model that can be replaced."""

import collections
import dataclasses

import keras
import keras_hub

from keras_efficient_attn.layers.keras_internals import (
    attributes_that_hold,
    call_arguments,
    check_can_replace,
    child_layers,
)
from keras_efficient_attn.models.conversion.adapters import (
    AttentionAdapter,
    Gemma3Adapter,
    GemmaAdapter,
    MistralAdapter,
    MultiHeadAdapter,
    RotaryAdapter,
    T5Adapter,
)
from keras_efficient_attn.models.keras_hub_internals import (
    has_own_masks,
    mask_method,
    require_from_hub,
    t5_bias_weights,
)

MULTI_HEAD = (
    keras.layers.MultiHeadAttention,
    keras_hub.layers.CachedMultiHeadAttention,
)
# KerasHub's unexported attention layers, by class name.
ADAPTERS = {
    "LlamaAttention": RotaryAdapter,
    "Phi3Attention": RotaryAdapter,
    "Qwen3Attention": RotaryAdapter,
    "QwenAttention": RotaryAdapter,
    "T5MultiHeadAttention": T5Adapter,
    "CachedMistralAttention": MistralAdapter,
    "CachedMixtralAttention": MistralAdapter,
    "CachedGemma3Attention": Gemma3Adapter,
    "CachedGemmaAttention": GemmaAdapter,
    "WhisperCachedMultiHeadAttention": MultiHeadAdapter,
}
_DISTANCE = "adds a bias that depends on the distance to its logits"
REFUSED = {
    "BloomAttention": _DISTANCE,
    "DisentangledSelfAttention": "adds logits of content and relative position",
    "FalconAttention": _DISTANCE,
    "TwoStreamRelativeAttention": "adds logits of content and relative position",
}
# Blocks of KerasHub around the layers in `ADAPTERS`: they merge causality, padding and,
# if given, `decoder_attention_mask` into one mask.
CAUSAL_BLOCKS = (
    "Gemma3DecoderBlock",
    "GemmaDecoderBlock",
    "LlamaTransformerDecoder",
    "MistralTransformerDecoder",
    "MixtralTransformerDecoder",
    "Phi3Decoder",
    "Qwen3TransformerDecoder",
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
class AttentionSite:
    """A self-attention layer in a model, and its surroundings.

    Attributes:
        parents: The layers that hold it, a tuple, usually of one.
        layer: The attention layer.
        adapter_class: The subclass of `AttentionAdapter` for layers of its kind.
        is_causal: Whether the parents pass masks that hide later keys.
        block: The largest layer around it that holds no other replaceable attention
            layer; its output is the residual stream.
        in_one_block: Whether the layer has a single parent, and the block is not the
            whole model.
        bias_weights: The weights of the bias by distance that T5's layers share, in the
            first layer of the layer's stack; `None` for other models.
    """

    parents: tuple
    layer: keras.layers.Layer
    adapter_class: type
    is_causal: bool
    block: keras.layers.Layer
    in_one_block: bool
    bias_weights: object = None

    @property
    def is_converted(self):
        """Whether the layer is an `AttentionAdapter`."""
        return isinstance(self.layer, AttentionAdapter)

    def check_parents(self):
        """Checks that the layer can be replaced, before anything changes.

        Raises:
            ValueError: If a parent holds the layer in an unknown way.
            MissingAttribute: If Keras or KerasHub lack a part that this needs.
        """
        for parent in self.parents:
            check_can_replace(parent, self.layer)
            if self.is_causal and not self.is_converted:
                mask_method(parent)
            in_graph = isinstance(parent, keras.Function)
            if not in_graph and not attributes_that_hold(parent, self.layer):
                raise ValueError(
                    f"{parent.name} must store its attention layer in an attribute, or "
                    "in a list, tuple or dict that is an attribute. Received: "
                    f"{self.layer.path}"
                )


def find_sites(model):
    """The self-attention layers of a model that can be replaced, in order.

    Includes adapters, which can be replaced again.

    Args:
        model: A built model or layer.

    Returns:
        List of `AttentionSite`.

    Raises:
        ValueError: If there is none, or the model has unsupported attention.
    """
    found, others = [], []
    parents_of = _parents(model)
    for layer, parents in list(parents_of.values())[1:]:
        name = type(layer).__name__
        if name in REFUSED:
            raise ValueError(
                f"The attention of this model cannot be replaced: {name} "
                f"{REFUSED[name]}, and efficient attention never forms the logits of "
                f"all queries by all keys. Received: {model.name}"
            )
        adapter_class = _adapter_class(layer)
        if adapter_class is not None:
            if not layer.built:
                raise ValueError(
                    "The model must be built, or called once, before its attention "
                    f"is replaced. Received: {name} {layer.name!r}, built=False"
                )
            if not any(_is_cross_attention(parent, layer) for parent in parents):
                found.append((layer, adapter_class, parents))
        elif "Attention" in name:
            others.append(name)
    if not found:
        names = ", ".join(dict.fromkeys(others)) or "none"
        raise ValueError(
            "`model` has no self-attention layer that can be replaced. Such layers are "
            f"MultiHeadAttention, CachedMultiHeadAttention, {', '.join(ADAPTERS)}. "
            f"Found in {model.name}: {names}"
        )
    around = [_layers_around(layer, parents_of) for layer, _, _ in found]
    number = collections.Counter(id(layer) for layers in around for layer in layers)
    sites, bias_weights = [], {}
    for (layer, adapter_class, parents), layers in zip(found, around, strict=True):
        is_causal = _is_causal(model, layer, adapter_class, parents)
        if t5_bias_weights(layer) is not None:
            bias_weights[is_causal] = t5_bias_weights(layer)
        alone = (block for block in reversed(layers) if number[id(block)] == 1)
        block = next(alone, parents[0])
        sites.append(
            AttentionSite(
                parents=tuple(parents),
                layer=layer,
                adapter_class=adapter_class,
                is_causal=is_causal,
                block=block,
                in_one_block=block is not model and len(parents) == 1,
                bias_weights=bias_weights.get(is_causal),
            )
        )
    return sites


def _is_cross_attention(parent, layer):
    """Whether queries and keys are different sequences.

    Decided by name and, in a Functional model, by the lengths of its inputs.
    """
    if any(_has_two_lengths(arguments) for arguments in call_arguments(layer)):
        return True
    names = [*layer.path.split("/"), *attributes_that_hold(parent, layer)]
    return "Pooling" in type(parent).__name__ or any("cross" in name for name in names)


def _has_two_lengths(arguments):
    named = dict(zip(("query", "value"), arguments.args, strict=False))
    named.update(arguments.kwargs)
    query, value = named.get("query"), named.get("value")
    lengths = {t.shape[1] for t in (query, value) if t is not None}
    return len(lengths - {None}) > 1


def _adapter_class(layer):
    if isinstance(layer, AttentionAdapter):
        return type(layer)
    # Subclasses may compute something else.
    if type(layer) in MULTI_HEAD:
        return MultiHeadAdapter
    if type(layer).__module__.split(".")[0] == "keras_hub":
        return ADAPTERS.get(type(layer).__name__)
    return None


def _is_causal(model, layer, adapter_class, parents):
    """Whether the parents of an attention layer pass it masks that hide later keys.

    Raises:
        ValueError: If they may pass other masks that differ between queries.
    """
    kinds = set()
    for parent in parents:
        kind = type(parent)
        name = f"{kind.__module__.rsplit('.', 1)[-1]}.{kind.__name__}"
        decoder = isinstance(parent, keras_hub.layers.TransformerDecoder)
        unknown = adapter_class.always_causal and kind.__name__ not in CAUSAL_BLOCKS
        if name in REFUSED_BLOCKS or unknown or (decoder and has_own_masks(kind)):
            raise ValueError(
                "The attention of this model cannot be replaced: its block passes, or "
                "may pass, masks that differ between queries, other than causality. "
                f"Received: {model.name}, with a {kind.__name__}"
            )
        if (
            kind.__name__ == "Gemma3DecoderBlock"
            and getattr(model, "vision_encoder", None) is not None
        ):
            raise ValueError(
                "The attention of this model cannot be replaced: the parts of an image "
                "see each other in both directions, so that it is not causal. "
                f"Received: {model.name}, with a vision_encoder"
            )
        is_t5_decoder = adapter_class is T5Adapter and require_from_hub(
            parent, "is_decoder"
        )
        kinds.add(decoder or adapter_class.always_causal or is_t5_decoder)
    if len(kinds) > 1:
        names = ", ".join(type(parent).__name__ for parent in parents)
        raise ValueError(
            "The attention of this model cannot be replaced: a layer is held by "
            "blocks of which some are causal and others are not. Received: "
            f"{layer.path}, in {names}"
        )
    return kinds.pop()


def _parents(model):
    """All layers below a model, in order, and the layers that hold them.

    Layers inside an adapter are skipped: they are part of it.

    Returns:
        Dict of pairs `(layer, parents)` by the layers' ids, the model first.
    """
    found = {id(model): (model, [])}

    def visit(layer):
        if isinstance(layer, AttentionAdapter):
            return
        for child in child_layers(layer):
            if id(child) not in found:
                found[id(child)] = (child, [layer])
                visit(child)
            elif child is not model:
                parents = found[id(child)][1]
                if all(parent is not layer for parent in parents):
                    parents.append(layer)

    visit(model)
    return found


def _layers_around(layer, parents_of):
    """The layer that holds another, and the layers around it that are not models."""
    around = []
    while True:
        layer = parents_of[id(layer)][1][0]
        outermost = isinstance(layer, keras.Model) or not parents_of[id(layer)][1]
        if around and outermost:
            return around
        around.append(layer)
        if outermost:
            return around
