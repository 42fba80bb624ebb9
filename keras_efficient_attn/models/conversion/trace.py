"""The calls of a model's attention layers on data, and fitting to them."""

import contextlib
import dataclasses
import functools
import inspect

import keras
import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.backend import BACKEND


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a layer.

    Attributes:
        args, kwargs: Arguments of the call of `layer.call`.
        arguments: Dict of the arguments by their names in `layer.call`.
        output: The layer's return value.
    """

    args: tuple
    kwargs: dict
    arguments: dict
    output: object

    @property
    def query(self):
        """The first argument."""
        return next(iter(self.arguments.values()))

    @property
    def key(self):
        """The keys' inputs; the queries' inputs if not given."""
        key = self.arguments.get("key")
        return self.arguments.get("value", self.query) if key is None else key


def trace(model, sites, inputs):
    """The calls of attention layers while a model runs over data once.

    Args:
        model: A built model.
        sites: List of `AttentionSite` in it.
        inputs: List of batches.

    Returns:
        A list of lists of `Call`, one for each site.

    Raises:
        ValueError: If the model does not call one of the layers.
    """
    layers = [site.layer for site in sites]
    records = [[] for _ in sites]
    for batch in inputs:
        for kept, found in zip(
            records, trace_layers(model, layers, batch), strict=True
        ):
            kept += found
    for layer, kept in zip(layers, records, strict=True):
        if not kept:
            raise ValueError(
                "The model does not call this attention layer, so that there is no "
                f"data to fit it to: leave it out of `layers`. Received: {layer.path}"
            )
    return records


def trace_layers(model, layers, batch):
    """The calls of layers while a model runs once, without training.

    Args:
        model: A built model.
        layers: List of layers in it.
        batch: One batch of the model's inputs.

    Returns:
        A list of lists of `Call`, one for each layer.
    """
    with record_calls(layers) as calls:
        run(model, batch, training=False)
    return calls


class _AllCalled(BaseException):
    """Ends a run. Keras wraps each `Exception` that passes a layer."""


def first_calls(model, layers, batch):
    """As `trace_layers`; the run ends when each of the layers has been called."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(_AllCalled))
        calls = stack.enter_context(record_calls(layers))
        for layer in layers:
            stack.enter_context(replace_call(layer, _ending(layer.call, calls)))
        run(model, batch, training=False)
    return calls


def _ending(record_call, calls):
    """A recorder of `record_calls` that ends the run after the last first call."""

    def call(*args, **kwargs):
        output = record_call(*args, **kwargs)
        if all(calls):
            raise _AllCalled
        return output

    return call


@contextlib.contextmanager
def record_calls(layers):
    """Records the calls of layers, in eager and in compiled code.

    Yields:
        A list of lists of `Call`, one for each layer, to which the calls are added.
    """
    calls = [[] for _ in layers]
    pairs = zip(layers, calls, strict=True)
    with enter_all(replace_call(layer, _recorder(layer, x)) for layer, x in pairs):
        yield calls


@contextlib.contextmanager
def enter_all(contexts):
    """Context that is in all of the contexts."""
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def run(function, *args, **kwargs):
    """Calls a model or layer without gradients."""
    with contextlib.ExitStack() as stack:
        if BACKEND == "torch":
            import torch

            stack.enter_context(torch.no_grad())
        return function(*args, **kwargs)


@contextlib.contextmanager
def replace_call(layer, call):
    """Context that replaces a layer's `call` by a function; may be nested."""
    before = vars(layer).get("call")
    layer.call = call
    try:
        yield
    finally:
        if before is None:
            del layer.call
        else:
            layer.call = before


def valid_positions(site, call):
    """Boolean `(batch, length)`, false at padding; `None` for no padding.

    Args:
        site: An `AttentionSite`.
        call: A `Call` of its attention layer.
    """
    mask = position_mask(site, call)
    if mask is None:
        return None
    return np.broadcast_to(ops.convert_to_numpy(mask), call.query.shape[:2])


def position_mask(site, call):
    """`valid_positions` as a tensor that broadcasts to that shape."""
    masks = [
        call.arguments.get(name) for name in ("query_mask", "key_mask", "value_mask")
    ]
    # T5's name is `mask`.
    dense = call.arguments.get("attention_mask", call.arguments.get("mask"))
    if dense is not None:
        # `(batch, heads, T, S)` and `(T, S)`, reduced to one row per text.
        dense = dense[:, 0] if len(dense.shape) == 4 else dense
        dense = dense[None] if len(dense.shape) == 2 else dense
        dense = dense if dense.shape[-2] == 1 else site.adapter_class.key_mask(dense)
        masks.append(dense[:, 0])
    masks = [ops.cast(mask, "bool") for mask in masks if mask is not None]
    return functools.reduce(ops.logical_and, masks) if masks else None


def attention_error(site, layer, calls):
    """The `relative_error` of a layer on the calls of the original attention layer.

    Args:
        site: The `AttentionSite` of the original layer.
        layer: The `AttentionAdapter` in its place, or the original itself.
        calls: List of `Call` of the original.
    """
    old = [call.output for call in calls]
    new = [run(layer, *call.args, **call.kwargs) for call in calls]
    return relative_error(old, new, [valid_positions(site, call) for call in calls])


def relative_error(old, new, valid):
    """`√(Σ‖new − old‖² / Σ‖old‖²)` over lists of outputs.

    Args:
        old, new: Lists of outputs `(batch, length, dim)`, or of tuples that start with
            one.
        valid: A list with a mask from `valid_positions` for each.
    """
    difference, norm = 0.0, 0.0
    for first, second, kept in zip(old, new, valid, strict=True):
        first, second = _array(first), _array(second)
        if kept is not None:
            first, second = first[kept], second[kept]
        difference += np.sum(np.square(second - first))
        norm += np.sum(np.square(first))
    return float(np.sqrt(difference / norm)) if norm else 0.0


def _recorder(layer, found):
    call = layer.call
    signature = inspect.signature(call)

    def record_call(*args, **kwargs):
        output = call(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs).arguments
        arguments |= arguments.pop("kwargs", {})
        found.append(Call(args, kwargs, arguments, output))
        return output

    return record_call


def _array(output):
    output = output[0] if isinstance(output, tuple) else output
    return ops.convert_to_numpy(ops.cast(output, "float32")).astype("float64")


def batches(data, name="calibrate"):
    """The batches in `calibrate`, a list, each as the model takes it.

    Args:
        data: A batch: an array, a dict of arrays, or a tuple `(inputs, targets)` or
            `(inputs, targets, weights)`, from which the inputs are used. Or an iterable
            of such batches: a list, a `tf.data.Dataset`, a `DataLoader`, ….
        name: The argument's name, for errors. Defaults to `"calibrate"`.

    Raises:
        TypeError: If `data` is of another kind.
        ValueError: If there is no batch.
    """
    if isinstance(data, dict | tuple) or hasattr(data, "shape"):
        data = [data]
    try:
        found = [keras.utils.unpack_x_y_sample_weight(batch)[0] for batch in data]
    except TypeError:
        raise TypeError(
            f"`{name}` must be a batch, or an iterable of batches. Received: "
            f"{name}={data!r}"
        ) from None
    if not found:
        raise ValueError(f"`{name}` must hold at least one batch. Received: none")
    return found


def fit(adapters, sites, records):
    """Fits the layers of built adapters, where possible, to the original inputs.

    Args:
        adapters: List of `AttentionAdapter`.
        sites: The `AttentionSite`s in the original, in the same order.
        records: From `trace` of the original, in the same order.
    """
    for adapter, site, calls in zip(adapters, sites, records, strict=True):
        if adapter.attention.can_calibrate:
            _fit_one(adapter.attention, site, calls)


def can_fit(adapters):
    """Whether one of the layers has something to fit."""
    return any(adapter.attention.can_calibrate for adapter in adapters)


def check_can_fit(adapters):
    """Raises `ValueError` if no layer has anything to fit."""
    if not can_fit(adapters):
        raise ValueError(
            "None of the layers can be calibrated: leave out `calibrate`, or use "
            "VQAttention or PerformerAttention with `calibrated=True`. Received: "
            f"{layer_names(adapters)}"
        )


def layer_names(adapters):
    """The distinct names of the efficient layers."""
    names = [type(adapter.attention).__name__ for adapter in adapters]
    return ", ".join(dict.fromkeys(names))


def _fit_one(attention, site, calls):
    queries, keys, causal = [], [], []
    same = all(call.query is call.key for call in calls)
    for call in calls:
        mask = valid_positions(site, call)
        keys.append(_with_mask(call.key, mask))
        if not same:
            queries.append(_with_mask(call.query, mask))
        causal.append(call.arguments.get("use_causal_mask", site.is_causal))
    options = {} if same else {"query": queries}
    if attention.calibrates_beyond_window:
        # Causality determines which keys are beyond the window.
        options["use_causal_mask"] = all(causal)
    attention.calibrate(keys, **options)


def _with_mask(x, mask):
    x = np.asarray(ops.convert_to_numpy(ops.cast(x, "float32")))
    return x if mask is None else (x, mask)
