"""The two paths of layers with a window: exact near keys, and an estimate of all."""

import contextlib

from keras import ops

from keras_efficient_attn.layers.keras_internals import (
    projections,
    set_projection,
)
from keras_efficient_attn.models.conversion.targets import build_adapter, make_adapter
from keras_efficient_attn.models.conversion.trace import replace_call
from keras_efficient_attn.ops.common.numerics import rms_normalize


def has_two_paths(site):
    """Whether an `AttentionSite` has a layer with a window and an estimate beyond."""
    return site.is_converted and site.layer.kernel.estimates_beyond_window


def linear_path_only(sites):
    """Context in which layers with two paths estimate all keys.

    Args:
        sites: List of `AttentionSite`.
    """
    layers = (site.layer for site in filter(has_two_paths, sites))
    return _enter_all(_without_window(layer.kernel) for layer in layers)


def window_only(sites):
    """Context in which layers with two paths attend to their window only.

    Args:
        sites: List of `AttentionSite`.
    """
    return _enter_all(
        replace_call(site.layer, _window_adapter(site).call)
        for site in filter(has_two_paths, sites)
    )


def drop_windows(sites, dropped):
    """Context in which layers with two paths drop their window as a tensor says.

    Args:
        sites: List of `AttentionSite`, all with two paths.
        dropped: Boolean `(sites,)`; may be a symbolic tensor in compiled code.
    """
    kernels = [site.layer.kernel for site in sites]
    return _enter_all(
        replace_call(kernel, _choosing_call(kernel, dropped[index]))
        for index, kernel in enumerate(kernels)
    )


@contextlib.contextmanager
def _enter_all(contexts):
    """Context that is in all of the contexts."""
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _window_adapter(site):
    """An adapter for the window of a layer, whose queries and keys are the layer's."""
    kernel = site.layer.kernel
    options = [f"window={kernel.window}"]
    if kernel.rotary_wavelength is not None:
        options.append(f"rotary_wavelength={kernel.rotary_wavelength}")
    adapter = make_adapter(f"local:{','.join(options)}", site)
    build_adapter(adapter, site)
    for name in ("query", "key"):
        project = projections(adapter.kernel)[name]
        set_projection(adapter.kernel, name, _projection_of(kernel, project))
    return adapter


def _projection_of(kernel, project):
    """A projection, with the norm and the temperature that a kernel gives it."""

    def prepare(x):
        heads = project(x)
        heads = rms_normalize(heads) if kernel.qk_norm else heads
        return heads * kernel.temperature**-0.5

    return prepare


def _choosing_call(kernel, dropped):
    call = kernel.call

    def choose(*args, **kwargs):
        def without_window():
            with _without_window(kernel):
                return call(*args, **kwargs)

        return ops.cond(dropped, without_window, lambda: call(*args, **kwargs))

    return choose


@contextlib.contextmanager
def _without_window(kernel):
    window = kernel.window
    kernel.window = None
    try:
        yield
    finally:
        kernel.window = window
