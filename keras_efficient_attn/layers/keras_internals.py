"""All uses of undocumented parts of Keras, one function each.

They are known to work with Keras 3.15. Each function asks for what it needs
by `require`, which names what another version does not have.
"""

import contextlib
import functools

import keras

from keras_efficient_attn.ops.common.backend import BACKEND

TESTED_VERSION = "3.15"
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
EVERY_LAYER_HAS = ("query", "key", "value", "dropout", "output")
_MISSING = object()


class MissingAttribute(RuntimeError):
    """An undocumented part of a library that the installed version does not have.

    Args:
        owner: The object or class that lacks it.
        name: The attribute's name.
        library: The module of the library. Defaults to `keras`.
        tested_version: The version that has it.
    """

    def __init__(self, owner, name, library=keras, tested_version=TESTED_VERSION):
        where = getattr(owner, "__name__", type(owner).__name__)
        super().__init__(
            f"{library.__name__} {library.__version__} has no `{where}.{name}`, an "
            f"undocumented part that this needs. {library.__name__} {tested_version} "
            "is known to have it."
        )


def require(owner, name, library=keras, tested_version=TESTED_VERSION):
    """An undocumented attribute of an object, a class or a module.

    Args:
        owner, name, library, tested_version: As for `MissingAttribute`.

    Raises:
        MissingAttribute: If the installed version does not have it.
    """
    found = getattr(owner, name, _MISSING)
    if found is _MISSING:
        raise MissingAttribute(owner, name, library, tested_version)
    return found


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
        elif name in EVERY_LAYER_HAS:
            raise MissingAttribute(layer, f"_{attribute}")
    return found


def set_projection(layer, name, projection):
    """Gives an attention layer another projection.

    Keras 3.15 sets `_query_dense` and so on in `MultiHeadAttention.build`.
    """
    setattr(layer, f"_{PROJECTIONS[name]}", projection)


def tracked_layers(layer):
    """The layers that a layer tracks, in the order of its attributes."""
    return require(layer, "_layers")


def child_layers(layer):
    """The layers that a layer holds; in order for a Functional model."""
    children = layer.layers if isinstance(layer, keras.Model) else []
    return [*children, *tracked_layers(layer)]


def flat_layers(layer):
    """A layer and all layers below it, each once."""
    found = {id(layer): layer}

    def visit(parent):
        for child in tracked_layers(parent):
            if id(child) not in found:
                found[id(child)] = child
                visit(child)

    visit(layer)
    return list(found.values())


def own_variables(layer):
    """The weights of a layer itself, by name.

    LoRA and quantisation add them in different orders.
    """
    below = {id(v) for child in tracked_layers(layer) for v in child.weights}
    own = [v for v in layer.weights if id(v) not in below]
    return sorted(own, key=lambda variable: variable.name)


def set_dtype_policy(layer, policy):
    """Sets the policy of a built layer.

    Keras' setter changes the layer's entry in a `DTypePolicyMap`, and not the policy.
    """
    require(layer, "_dtype_policy")
    layer._dtype_policy = policy


def lora_of(layer):
    """`(rank, alpha)` of a layer with LoRA, else `None`."""
    if not getattr(layer, "lora_enabled", False):
        return None
    return require(layer, "lora_rank"), require(layer, "lora_alpha")


def lora_variables(model):
    """The factors of LoRA below a model that train: `lora_kernel_a` and so on."""
    if not any(v.name.startswith("lora_") for v in model.weights):
        raise MissingAttribute(model, "lora_kernel_a")
    return [v for v in model.trainable_variables if v.name.startswith("lora_")]


def is_called_alone(layer):
    """Whether a layer, in its `call`, was called by no other layer or model."""
    return require(require(layer, "_get_call_context")(), "entry_layer") is layer


def call_arguments(layer):
    """The arguments of a layer's calls in a Functional graph."""
    return [require(node, "arguments") for node in require(layer, "_inbound_nodes")]


def attributes_that_hold(parent, layer):
    """The attributes that are, or contain, a layer: a dict."""
    # On PyTorch, Keras' layers are modules, which keep modules in `_modules`.
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


def check_can_replace(parent, layer):
    """Raises `MissingAttribute` if `replace_child` cannot replace a parent's layer."""
    require(require(parent, "_tracker"), "replace_tracked_value")
    if BACKEND == "torch":
        require(parent, "_track_variables")
    if isinstance(parent, keras.Function):
        require(parent, "_operations_by_depth")
        require(layer, "_outbound_nodes")
        for node in require(layer, "_inbound_nodes"):
            for tensor in require(node, "outputs"):
                require(tensor, "_keras_history")


def replace_child(parent, old, new):
    """Replaces a layer that a layer or model holds by another built layer.

    Keras refuses new layers in a built layer, except through its own `_tracker`.
    """
    check_can_replace(parent, old)
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
    """Replaces a layer in the nodes and tensors of a Functional model."""
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
    """Registers variables added to a built model with PyTorch."""
    if BACKEND == "torch":
        for layer in flat_layers(model):
            require(layer, "_track_variables")()


def forget_compiled(model):
    """Drops the compiled functions of a model, of KerasHub's tasks too."""
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


def without_autocast():
    """A scope in which variables keep their dtype."""
    return functools.reduce(require, ("src", "backend", "AutocastScope"), keras)(None)


def implicit_mask(x):
    """The mask that Keras keeps with a tensor, or `None`.

    Keras gives it to `mask` of a layer only if the call has no other tensors.
    """
    return functools.reduce(require, ("src", "backend", "get_keras_mask"), keras)(x)


def update_variables(model):
    """Gives a model's variables the values that a running `fit` has on JAX."""
    if BACKEND == "jax":
        require(model, "jax_state_sync")()


@contextlib.contextmanager
def deferred_variables():
    """Variables that are made inside get their values at the end, one by one."""
    names = "src", "backend", "common", "global_state", "set_global_attribute"
    set_global = functools.reduce(require, names, keras)
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
        # Its end gives all variables their values.
        with keras.StatelessScope():
            pass
    except BaseException:
        # The end of the next scope would go on with these variables.
        set_global("uninitialized_variables", [])
        raise


def set_initializer(variable, initializer):
    """Gives a variable in `deferred_variables` another initialiser."""
    require(variable, "_initializer")
    variable._initializer = initializer
