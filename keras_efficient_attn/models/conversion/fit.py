"""Fits efficient attention to the computations of a trained model on data."""

import keras
import numpy as np
from keras import ops

from keras_efficient_attn.models.conversion.trace import valid_rows


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
    """Fits the kernels of built adapters, where possible, to the layers' inputs.

    Args:
        adapters: List of `AttentionAdapter`.
        sites: The `AttentionSite`s in the original, in the same order.
        records: From `trace` of the original, in the same order.
    """
    for adapter, site, calls in zip(adapters, sites, records, strict=True):
        if adapter.kernel.can_calibrate:
            _fit_one(adapter.kernel, site, calls)


def can_fit(adapters):
    """Whether one of the kernels has something to fit."""
    return any(adapter.kernel.can_calibrate for adapter in adapters)


def check_can_fit(adapters):
    """Raises `ValueError` if no kernel has anything to fit."""
    if not can_fit(adapters):
        raise ValueError(
            f"{kernel_names(adapters)} with these options has nothing to fit, and "
            "`calibrate` no use but for layers='auto'. VQAttention has, and "
            "PerformerAttention with `calibrated=True`."
        )


def kernel_names(adapters):
    """The distinct names of the efficient layers."""
    names = [type(adapter.kernel).__name__ for adapter in adapters]
    return ", ".join(dict.fromkeys(names))


def _fit_one(kernel, site, calls):
    queries, keys, causal = [], [], []
    same = all(call.query is call.key for call in calls)
    for call in calls:
        mask = valid_rows(site, call)
        keys.append(_with_mask(call.key, mask))
        if not same:
            queries.append(_with_mask(call.query, mask))
        causal.append(call.arguments.get("use_causal_mask", site.is_causal))
    options = {} if same else {"query": queries}
    if kernel.calibrates_beyond_window:
        # Causality determines which keys are beyond the window.
        options["use_causal_mask"] = all(causal)
    kernel.calibrate(keys, **options)


def _with_mask(x, mask):
    x = np.asarray(ops.convert_to_numpy(ops.cast(x, "float32")))
    return x if mask is None else (x, mask)
