"""All uses of undocumented parts of Keras and KerasHub, one function each.

Checked with Keras 3.15 and KerasHub 0.32.
"""

import contextlib
import functools
import importlib
import inspect
import types

import keras
import keras_hub
from keras import ops

from keras_efficient_attn.ops.common.backend import BACKEND

# KerasHub's attention layers use other names for the same layers.
PROJECTIONS = {
    "query": "query_dense",
    "query_norm": "query_dense_layer_norm",
    "key": "key_dense",
    "key_norm": "key_dense_layer_norm",
    "gate": "gate_dense",
    "value": "value_dense",
    "dropout": "dropout_layer",
    "output": "output_dense",
}


def projections(layer):
    """The projections, their norms and the dropout of an attention layer: a dict.

    Keras 3.15 has them as `_query_dense`, KerasHub 0.32 also as `query_dense`, T5 as
    `query_projector`, and norms also as `query_norm`.
    """
    found = {}
    for name, attribute in PROJECTIONS.items():
        attributes = [f"_{attribute}", attribute, f"{name}_projector"]
        attributes += [name] if name.endswith("_norm") else []
        held = (getattr(layer, attribute, None) for attribute in attributes)
        held = next((layer for layer in held if layer is not None), None)
        if held is not None:
            found[name] = held
    return found


def set_projection(layer, name, projection):
    """Gives an attention layer another projection.

    Keras 3.15 sets `_query_dense` and so on in `MultiHeadAttention.build`.
    """
    setattr(layer, f"_{PROJECTIONS[name]}", projection)


def child_layers(layer):
    """The layers that a layer holds; in order for a Functional model.

    Keras 3.15 lists the layers that it tracks in `Layer._layers`.
    """
    children = layer.layers if isinstance(layer, keras.Model) else []
    return [*children, *layer._layers]


def tracked_layers(layer):
    """The layers that a layer tracks, in the order of its attributes (Keras 3.15)."""
    return layer._layers


def flat_layers(layer, include_self=True):
    """A layer and all layers below it (Keras 3.15: `Layer._flatten_layers`)."""
    return layer._flatten_layers(include_self=include_self)


@contextlib.contextmanager
def hidden_layers(model, hidden):
    """Context that hides layers below a model; may be nested.

    KerasHub 0.32 numbers the layers with LoRA by `Backbone._flatten_layers`.

    Args:
        model: A model.
        hidden: List of layers.
    """
    if "_flatten_layers" in vars(model):
        yield
        return
    ids = {id(layer) for layer in hidden}
    flatten = model._flatten_layers

    def flatten_others(*args, **kwargs):
        return [layer for layer in flatten(*args, **kwargs) if id(layer) not in ids]

    model._flatten_layers = flatten_others
    try:
        yield
    finally:
        del model._flatten_layers


def own_variables(layer):
    """The variables of a layer itself, by name.

    Keras 3.15; LoRA and quantisation add them in different orders.
    """
    variables = layer._trainable_variables + layer._non_trainable_variables
    return sorted(variables, key=lambda variable: variable.name)


def set_dtype_policy(layer, policy):
    """Sets the policy of a built layer, for which Keras 3.15 has no setter."""
    layer._dtype_policy = policy


def copy_lora_state(source, target):
    """Copies the list of layers with LoRA: attributes of KerasHub 0.32's backbones."""
    if hasattr(source, "_lora_enabled_layers"):
        target._lora_rank = source._lora_rank
        target._lora_enabled_layers = list(source._lora_enabled_layers)


def lora_of(layer):
    """`(rank, alpha)` of a layer with LoRA, else `None` (Keras 3.15)."""
    if not getattr(layer, "lora_enabled", False):
        return None
    return layer.lora_rank, layer.lora_alpha


def lora_variables(model):
    """The factors of LoRA below a model: `lora_kernel_a` and so on (Keras 3.15)."""
    return [v for v in model.trainable_variables if v.name.startswith("lora_")]


def t5_bias(weights, distances, causal):
    """T5's bias of the logits by distance, `(distances, heads)`.

    Args:
        weights: The weights `(buckets, heads)` of the first layer of a stack.
        distances: Integer array, query position - key position.
        causal: Whether the stack is a decoder.
    """
    buckets = _t5_attention()._relative_position_bucket(
        ops.convert_to_tensor(-distances, "int32"),
        bidirectional=not causal,
        num_buckets=weights.shape[0],
    )
    return ops.take(weights, buckets, axis=0)


def t5_bias_weights(layer):
    """The weights that `t5_bias` reads, in the first layer of a stack; else `None`.

    KerasHub 0.32's `T5MultiHeadAttention`, or an adapter with its attributes.
    """
    return getattr(layer, "relative_attention_bias", None)


def _t5_attention():
    module = importlib.import_module("keras_hub.src.models.t5.t5_multi_head_attention")
    return module.T5MultiHeadAttention


def skip_projections(layer):
    """Makes an `EfficientAttention` build only its own weights."""
    layer._build_projections = lambda *shapes: None


def call_arguments(layer):
    """The arguments of a layer's calls in a Functional graph (Keras 3.15)."""
    return [node.arguments for node in layer._inbound_nodes]


def attributes_that_hold(parent, layer):
    """The attributes that are, or contain, a layer: a dict."""
    # On PyTorch, Keras 3.15 also stores layers in `_modules`.
    attributes = {**vars(parent), **vars(parent).get("_modules", {})}
    # Keras' own list of all layers, however they are held.
    attributes.pop("_layers", None)
    found = {}
    for name, value in attributes.items():
        held = value.values() if isinstance(value, dict) else value
        if value is layer or (
            isinstance(value, list | tuple | dict) and any(v is layer for v in held)
        ):
            found[name] = value
    return found


def replace_child(parent, old, new):
    """Replaces a layer that a layer or model holds by another built layer.

    Keras 3.15 refuses new layers in a built layer, except through its own `_tracker`.
    """
    attributes = attributes_that_hold(parent, old)
    parent._tracker.replace_tracked_value("layers", old, new)
    for name, value in attributes.items():
        if value is old:
            setattr(parent, name, new)
        elif isinstance(value, tuple):
            setattr(parent, name, tuple(new if v is old else v for v in value))
        else:
            _replace_in_collection(value, old, new)
    if isinstance(parent, keras.Function):
        _replace_in_graph(parent, old, new)


def _replace_in_graph(model, old, new):
    """The graph of a Functional model, in nodes and tensors of Keras 3.15."""
    new._inbound_nodes = old._inbound_nodes
    new._outbound_nodes = old._outbound_nodes
    for node in old._inbound_nodes:
        node.operation = new
        for tensor in node.outputs:
            tensor._keras_history = tensor._keras_history._replace(operation=new)
    for operations in model._operations_by_depth.values():
        _replace_in_collection(operations, old, new)


def _replace_in_collection(collection, old, new):
    keys = range(len(collection)) if isinstance(collection, list) else list(collection)
    for key in keys:
        if collection[key] is old:
            collection[key] = new


def track_parameters(model):
    """Registers variables added to a built model with PyTorch (Keras 3.15)."""
    if BACKEND == "torch":
        for layer in model._flatten_layers():
            layer._track_variables()


def forget_compiled(model):
    """Drops a model's compiled functions (Keras 3.15, KerasHub 0.32)."""
    if isinstance(model, keras.Model):
        model.compiled = False
    for name in (
        "train_function",
        "test_function",
        "predict_function",
        "generate_function",
    ):
        if hasattr(model, name):
            setattr(model, name, None)


def has_own_masks(block_class):
    """Whether a subclass of KerasHub's decoder may override its masks.

    KerasHub 0.32 makes them in `_compute_self_attention_mask`.
    """
    decoder = keras_hub.layers.TransformerDecoder
    names = ("call", "_compute_self_attention_mask")
    return any(
        getattr(block_class, name) is not getattr(decoder, name) for name in names
    )


def refuse_other_masks(block):
    """Makes a decoder block refuse masks other than causality and padding.

    The block merges all masks into one, so its attention layer cannot tell them apart;
    KerasHub 0.32 does so in `_compute_self_attention_mask`. T5's block has one mask,
    `attention_mask`, and calls the method without names.
    """
    make_mask = getattr(block, "_compute_self_attention_mask", None)
    if make_mask is None:
        return
    signature = inspect.signature(make_mask)

    def make_mask_of_keys(*args, **kwargs):
        arguments = signature.bind(*args, **kwargs).arguments
        for name in ("decoder_attention_mask", "attention_mask"):
            mask = arguments.get(name)
            # T5's backbone passes its padding masks `(batch, 1, length)`.
            if mask is not None and (name != "attention_mask" or mask.shape[-2] != 1):
                raise ValueError(
                    "Efficient attention cannot apply a mask that differs between "
                    "queries, but for causality. Pass a mask over keys as "
                    f"`decoder_padding_mask`. Received: {name}.shape="
                    f"{tuple(mask.shape)}, in {block.name}"
                )
        return make_mask(*args, **kwargs)

    block._compute_self_attention_mask = make_mask_of_keys


def wrap_generate_step(task_class, make_context):
    """Runs `generate_step` of a task inside a context.

    KerasHub 0.32 does not pass the prompts' lengths to `_build_cache`, and its tasks
    have no option for another cache.

    Args:
        task_class: A subclass of `keras_hub.models.CausalLM` or `Seq2SeqLM`.
        make_context: Called with the task and the inputs of `generate_step`; returns a
            context manager.
    """
    stock = task_class.generate_step

    @functools.wraps(stock)
    def generate_step(self, inputs, stop_token_ids=None):
        with make_context(self, inputs):
            return stock(self, inputs, stop_token_ids)

    task_class.generate_step = generate_step


@contextlib.contextmanager
def generation_methods(task, build_cache, call_with_cache):
    """Context that gives a task other methods for its cache.

    KerasHub 0.32 calls them `_build_cache`, and `call_with_cache` or, in a `Seq2SeqLM`,
    `call_decoder_with_cache`.
    """
    if "_build_cache" in vars(task):
        # Tasks with two names, and those that inherit `generate_step`, are wrapped
        # twice.
        yield
        return
    is_seq2seq = isinstance(task, keras_hub.models.Seq2SeqLM)
    name = "call_decoder_with_cache" if is_seq2seq else "call_with_cache"
    methods = {"_build_cache": build_cache, name: call_with_cache}
    for method, replacement in methods.items():
        setattr(task, method, replacement)
    try:
        yield
    finally:
        for method in methods:
            delattr(task, method)


def empty_cross_attention_cache(task, encoder_token_ids, decoder_token_ids):
    """The cache of cross-attention, by `_initialize_cache` of KerasHub 0.32."""
    return task._initialize_cache(encoder_token_ids, decoder_token_ids)[1]


def gated_delta_nets(model):
    """The layers of Qwen 3.5 that compute a gated delta rule (KerasHub 0.32)."""
    return [
        layer for layer in model._flatten_layers() if isinstance(layer, _gated_net())
    ]


@functools.cache
def gated_delta_net_with(rule):
    """A class of these layers that uses another rule.

    `call` of KerasHub 0.32 calls two functions of its module, one for sequences and one
    for a token, with the same arguments. Here both names refer to `rule`.
    """
    original = _gated_net()
    names = "_chunk_gated_delta_rule", "_recurrent_gated_delta_rule"
    scope = {**original.call.__globals__, **dict.fromkeys(names, rule)}
    call = types.FunctionType(
        original.call.__code__, scope, "call", original.call.__defaults__
    )
    return type(original.__name__, (original,), {"call": call})


def _gated_net():
    module = importlib.import_module(
        "keras_hub.src.models.qwen3_5.qwen3_5_gated_delta_net"
    )
    return module.Qwen3_5GatedDeltaNet
