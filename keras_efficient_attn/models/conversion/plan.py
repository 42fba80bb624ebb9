"""The plan of a conversion: the new attention of each layer."""

import contextlib
import dataclasses

import keras

from keras_efficient_attn.layers.keras_internals import (
    forget_compiled,
    replace_child,
    track_parameters,
)
from keras_efficient_attn.models.conversion.sites import find_sites
from keras_efficient_attn.models.conversion.specification import (
    expand_pattern,
    is_pattern,
    make_adapter,
    normalize_spec,
    specs_per_layer,
)
from keras_efficient_attn.models.keras_hub_internals import (
    refuse_other_masks,
)


@dataclasses.dataclass(frozen=True)
class ConversionPlan:
    """The self-attention layers of a model to replace, and their replacements.

    Attributes:
        model: The built model or layer.
        sites: All its `AttentionSite`s, in the order of the model.
        attention: The specification, from `normalize_spec`.
        layers: Sorted indices of the sites to replace, or `None` for all.
    """

    model: keras.layers.Layer
    sites: tuple
    attention: object
    layers: list | None

    def __post_init__(self):
        specs_per_layer(self.attention, len(self.indices))
        for stack in self.shared_stacks:
            kept = [index for index in stack if index not in self.indices]
            if len(kept) < len(stack) and not all(
                self.sites[index].is_converted for index in kept
            ):
                raise ValueError(
                    "The layers of a stack share the bias of their logits by distance, "
                    f"and are replaced together: {stack} in {self.model.name}. "
                    f"Received: layers={self.indices}"
                )

    @property
    def indices(self):
        """The indices of the sites to replace, a list."""
        return list(range(len(self.sites))) if self.layers is None else self.layers

    @property
    def shared_stacks(self):
        """The indices of the sites of each stack that is replaced as a whole."""
        stacks = {}
        for index, site in enumerate(self.sites):
            if site.adapter_class.shares_with_stack:
                stacks.setdefault(site.is_causal, []).append(index)
        return list(stacks.values())

    @property
    def chosen_sites(self):
        """The sites to replace, a list."""
        return [self.sites[index] for index in self.indices]

    @property
    def specs(self):
        """The specifications of `chosen_sites`, a list."""
        return specs_per_layer(self.attention, len(self.indices))

    def replace(self, **changes):
        """The plan with another `attention` or other `layers`."""
        return dataclasses.replace(self, **changes)

    def make_adapters(self):
        """New adapters for `chosen_sites`, which are not built.

        Raises:
            ValueError: If an attention cannot replace a layer.
        """
        for site in self.chosen_sites:
            site.check_parents()
        return [
            make_adapter(spec, site)
            for spec, site in zip(self.specs, self.chosen_sites, strict=True)
        ]

    def install(self, adapters):
        """Replaces the layers in the model itself by adapters.

        Args:
            adapters: From `make_adapters`.

        Returns:
            All current sites of the model, a tuple.
        """
        sites = list(self.sites)
        for index, site, adapter in zip(
            self.indices, self.chosen_sites, adapters, strict=True
        ):
            if not adapter.built:
                build_adapter(adapter, site)
            for parent in site.parents:
                replace_child(parent, site.layer, adapter)
                if site.is_causal and not site.is_converted:
                    refuse_other_masks(parent)
            sites[index] = dataclasses.replace(site, layer=adapter)
        track_parameters(self.model)
        forget_compiled(self.model)
        return tuple(sites)


def plan_conversion(model, attention, layers=None):
    """Makes the plan of a conversion; does not change the model.

    Args:
        model: A built model or layer.
        attention: As for `convert_backbone`.
        layers: Indices of self-attention layers, or `None` for all. Must be `None` with
            a pattern, which selects the layers itself.

    Returns:
        A `ConversionPlan`.

    Raises:
        ValueError: If the model has no layer that can be replaced, or not these layers,
            or if the list of attentions and the layers differ in length.
        TypeError: If `attention` is not an attention specification.
    """
    sites = tuple(find_sites(model))
    if is_pattern(attention):
        if layers is not None:
            raise ValueError(
                "A pattern says which layers it replaces: `layers` must be None. "
                f"Received: attention={attention!r}, layers={layers!r}"
            )
        attention, layers = expand_pattern(attention, len(sites))
    attention = normalize_spec(attention)
    return ConversionPlan(model, sites, attention, _check_layers(layers, len(sites)))


def build_adapter(adapter, site):
    """Builds an adapter under the paths of the layer that it replaces."""
    with contextlib.ExitStack() as stack:
        for name in site.layer.path.split("/")[:-1]:
            stack.enter_context(keras.name_scope(name))
        adapter.build()


def _check_layers(layers, count):
    """The indices in `layers`, sorted; `None` for `None`."""
    if layers is None:
        return None
    try:
        indices = sorted(set(layers))
    except TypeError:
        indices = [None]
    if not indices or not all(
        isinstance(index, int) and 0 <= index < count for index in indices
    ):
        raise ValueError(
            "`layers` must be None or the indices of self-attention layers, from 0 to "
            f"{count - 1}. Received: layers={layers!r}"
        )
    return indices
