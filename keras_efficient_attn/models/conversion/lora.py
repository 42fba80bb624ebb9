"""LoRA files of KerasHub, which a backbone and its converted copy both read."""

import contextlib

from keras_efficient_attn.models.conversion.places import stand_ins
from keras_efficient_attn.models.conversion.stand_ins import kept_layers


@contextlib.contextmanager
def counted_as_original(backbone):
    """Hides, for a time, the layers that a converted backbone has beside the original.

    KerasHub knows layers with LoRA by their numbers among all that have weights, and
    some stand-ins hold further such layers: codebooks, say.
    """
    if "_flatten_layers" in vars(backbone):
        yield
        return
    hidden = {id(own) for layer in stand_ins(backbone) for own in _own_layers(layer)}
    flatten = backbone._flatten_layers

    def flatten_others(*args, **kwargs):
        return [layer for layer in flatten(*args, **kwargs) if id(layer) not in hidden]

    backbone._flatten_layers = flatten_others
    try:
        yield
    finally:
        del backbone._flatten_layers


def _own_layers(stand_in):
    """The layers inside that are not those of the replaced one."""
    kept = {
        id(layer)
        for outer in kept_layers(stand_in).values()
        for layer in outer._flatten_layers()
    }
    inside = stand_in._flatten_layers(include_self=False)
    return [layer for layer in inside if id(layer) not in kept]
