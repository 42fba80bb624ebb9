"""The two paths of layers with a window: exact near keys, and an estimate of all."""

import contextlib

from keras import ops

from keras_efficient_attn.layers.keras_internals import (
    projections,
    set_projection,
)
from keras_efficient_attn.models.conversion.targets import build_adapter, make_adapter
from keras_efficient_attn.models.conversion.trace import (
    enter_all,
    replace_call,
)
from keras_efficient_attn.ops.common.numerics import rms_normalize


def has_two_paths(site):
    """Whether an `AttentionSite` has a layer with a window and an estimate beyond."""
    return site.is_converted and site.layer.attention.estimates_beyond_window


def linear_path_only(sites):
    """Context in which layers with two paths estimate all keys.

    Args:
        sites: List of `AttentionSite`.
    """
    layers = (site.layer for site in filter(has_two_paths, sites))
    return enter_all(_without_window(layer.attention) for layer in layers)


def window_only(sites):
    """Context in which layers with two paths attend to their window only.

    Args:
        sites: List of `AttentionSite`.
    """
    return enter_all(
        replace_call(site.layer, _window_adapter(site).call)
        for site in filter(has_two_paths, sites)
    )


def drop_windows(sites, dropped):
    """Context in which layers with two paths drop their window as a tensor says.

    Args:
        sites: List of `AttentionSite`, all with two paths.
        dropped: Boolean `(sites,)`; may be a symbolic tensor in compiled code.
    """
    layers = [site.layer.attention for site in sites]
    return enter_all(
        replace_call(layer, _choosing_call(layer, dropped[index]))
        for index, layer in enumerate(layers)
    )


def _window_adapter(site):
    """An adapter for the window of a layer, whose queries and keys are the layer's."""
    attention = site.layer.attention
    options = [f"window={attention.window}"]
    if attention.rotary_wavelength is not None:
        options.append(f"rotary_wavelength={attention.rotary_wavelength}")
    adapter = make_adapter(f"local:{','.join(options)}", site)
    build_adapter(adapter, site)
    for name in ("query", "key"):
        project = projections(adapter.attention)[name]
        set_projection(adapter.attention, name, _projection_of(attention, project))
    return adapter


def _projection_of(attention, project):
    """A projection, with the norm and the temperature that a layer gives it."""

    def prepare(x):
        heads = project(x)
        heads = rms_normalize(heads) if attention.qk_norm else heads
        return heads * attention.temperature**-0.5

    return prepare


def _choosing_call(attention, dropped):
    call = attention.call

    def choose(*args, **kwargs):
        def without_window():
            with _without_window(attention):
                return call(*args, **kwargs)

        return ops.cond(dropped, without_window, lambda: call(*args, **kwargs))

    return choose


@contextlib.contextmanager
def _without_window(attention):
    window = attention.window
    attention.window = None
    try:
        yield
    finally:
        attention.window = window
