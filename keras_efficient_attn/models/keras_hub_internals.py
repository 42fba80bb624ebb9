"""All uses of undocumented parts of KerasHub, one function each.

They are known to work with KerasHub 0.32. Each function asks for what it needs by
`require_from_hub`, which names what another version does not have.
"""

import contextlib
import functools
import importlib
import inspect
import types

import keras_hub

from keras_efficient_attn.layers.keras_internals import (
    MissingAttribute,
    flat_layers,
    require,
)

LIBRARY = dict(library=keras_hub, tested_version="0.32")
# Masks of decoder blocks that may differ between queries.
MASKS = ("decoder_attention_mask", "attention_mask")
# The rules of Qwen 3.5's layer, for sequences and for a token.
RULES = ("_chunk_gated_delta_rule", "_recurrent_gated_delta_rule")


def require_from_hub(owner, name):
    """An undocumented attribute of an object, a class or a module of KerasHub.

    Raises:
        MissingAttribute: If the installed version does not have it.
    """
    return require(owner, name, **LIBRARY)


def t5_bias_weights(layer):
    """The weights of T5's bias, in the first layer of a stack; else `None`.

    Of KerasHub's `T5MultiHeadAttention`, or an adapter with its attributes.
    """
    return getattr(layer, "relative_attention_bias", None)


@contextlib.contextmanager
def hidden_layers(model, hidden):
    """Context that hides layers below a model; may be nested.

    KerasHub numbers the layers with LoRA by `Backbone._flatten_layers`.

    Args:
        model: A model.
        hidden: List of layers.
    """
    if "_flatten_layers" in vars(model):
        yield
        return
    ids = {id(layer) for layer in hidden}
    flatten = require(model, "_flatten_layers")

    def flatten_others(*args, **kwargs):
        return [layer for layer in flatten(*args, **kwargs) if id(layer) not in ids]

    model._flatten_layers = flatten_others
    try:
        yield
    finally:
        del model._flatten_layers


def copy_lora_state(source, target):
    """Copies a backbone's list of layers with LoRA, if it has one."""
    if hasattr(source, "_lora_enabled_layers"):
        target._lora_rank = require_from_hub(source, "_lora_rank")
        target._lora_enabled_layers = list(source._lora_enabled_layers)


def has_own_masks(block_class):
    """Whether a subclass of KerasHub's decoder may override its masks."""
    decoder = keras_hub.layers.TransformerDecoder
    return any(
        require_from_hub(block_class, name) is not require_from_hub(decoder, name)
        for name in ("call", "_compute_self_attention_mask")
    )


def mask_method(block):
    """The method by which a decoder block merges its masks into one.

    Returns:
        The method; `None` for a block that takes no mask but padding, as Gemma's.
    """
    if not set(MASKS) & set(inspect.signature(type(block).call).parameters):
        return None
    return require_from_hub(block, "_compute_self_attention_mask")


def refuse_other_masks(block):
    """Makes a decoder block refuse masks other than causality and padding.

    The block merges all masks into one, so its attention layer cannot tell them apart.
    T5's block has one mask, `attention_mask`, and calls the method without names.
    """
    make_mask = mask_method(block)
    if make_mask is None:
        return
    signature = inspect.signature(make_mask)

    def make_mask_of_keys(*args, **kwargs):
        arguments = signature.bind(*args, **kwargs).arguments
        for name in MASKS:
            mask = arguments.get(name)
            # T5's backbone passes its padding masks `(batch, 1, length)`.
            if mask is not None and (name != "attention_mask" or mask.shape[-2] != 1):
                raise ValueError(
                    "Efficient attention cannot apply a mask that differs between "
                    "queries, other than causality. Pass a mask over keys as "
                    "`decoder_padding_mask`. Received: "
                    f"{name}.shape={tuple(mask.shape)}, in {block.name}"
                )
        return make_mask(*args, **kwargs)

    block._compute_self_attention_mask = make_mask_of_keys


def wrap_generate_step(task_class, run):
    """Runs `generate_step` of a task by another function.

    KerasHub does not pass the prompts' lengths to `_build_cache`, and its tasks have no
    option for another cache.

    Args:
        task_class: A subclass of `keras_hub.models.CausalLM` or `Seq2SeqLM`.
        run: Called with the task, the function `generate_step` and its two arguments.
            Tasks with two names, and those that inherit `generate_step`, are wrapped
            twice: a call within a call does not go through `run`.
    """
    stock = task_class.generate_step

    @functools.wraps(stock)
    def generate_step(self, inputs, stop_token_ids=None):
        if "_build_cache" in vars(self):
            return stock(self, inputs, stop_token_ids)
        return run(self, stock, inputs, stop_token_ids)

    task_class.generate_step = generate_step


@contextlib.contextmanager
def generation_methods(task, build_cache, call_with_cache):
    """Context that gives a task other methods for its cache.

    KerasHub calls them `_build_cache`, and `call_with_cache` or, in a `Seq2SeqLM`,
    `call_decoder_with_cache`.
    """
    is_seq2seq = isinstance(task, keras_hub.models.Seq2SeqLM)
    name = "call_decoder_with_cache" if is_seq2seq else "call_with_cache"
    methods = {"_build_cache": build_cache, name: call_with_cache}
    for method in methods:
        require_from_hub(task, method)
    try:
        for method, replacement in methods.items():
            setattr(task, method, replacement)
        yield
    finally:
        for method in methods:
            delattr(task, method)


def empty_cross_attention_cache(task, encoder_token_ids, decoder_token_ids):
    """The cache of cross-attention of a `Seq2SeqLM` before the first position."""
    initialize = require_from_hub(task, "_initialize_cache")
    return initialize(encoder_token_ids, decoder_token_ids)[1]


def gated_delta_nets(model):
    """The layers of Qwen 3.5 that compute a gated delta rule."""
    net = _gated_delta_net()
    return [layer for layer in flat_layers(model) if isinstance(layer, net)]


def softmax_layers_beside_delta(backbone):
    """The softmax layers of a backbone of Qwen 3.5."""
    return [
        require_from_hub(block, "_self_attention_layer")
        for block in backbone.transformer_layers
        if block.layer_type == "full_attention"
    ]


@functools.cache
def gated_delta_net_with(rule):
    """A class of these layers that uses another rule.

    `call` calls two functions of its module, one for sequences and one for a token,
    with the same arguments. Here both names refer to `rule`.
    """
    original = _gated_delta_net()
    module, call = inspect.getmodule(original), original.call
    for name in RULES:
        require_from_hub(module, name)
        if name not in call.__code__.co_names:
            raise MissingAttribute(call, name, **LIBRARY)
    scope = {**vars(module), **dict.fromkeys(RULES, rule)}
    call = types.FunctionType(call.__code__, scope, "call", call.__defaults__)
    return type(original.__name__, (original,), {"call": call})


def _gated_delta_net():
    module = _hub_module("src.models.qwen3_5.qwen3_5_gated_delta_net")
    return require_from_hub(module, "Qwen3_5GatedDeltaNet")


def _hub_module(name):
    try:
        return importlib.import_module(f"keras_hub.{name}")
    except ImportError:
        raise MissingAttribute(keras_hub, name, **LIBRARY) from None


def preset_file(preset, name):
    """The local path of a preset's file, which KerasHub downloads if it must.

    Raises:
        FileNotFoundError: If the preset does not have the file.
        ValueError: If there is no such preset.
    """
    module = _hub_module("src.utils.preset_utils")
    return require_from_hub(module, "get_file")(str(preset), name)
