"""What a conversion replaces, and by what: the layers and the attention of each."""

import contextlib
import dataclasses
import inspect
import numbers

import keras

from keras_efficient_attn.layers import EfficientAttention
from keras_efficient_attn.layers.attention.registry import parse_attention
from keras_efficient_attn.layers.keras_internals import (
    forget_compiled,
    replace_child,
    track_parameters,
)
from keras_efficient_attn.models.blocks.attention import attention_spec
from keras_efficient_attn.models.conversion.sites import find_sites
from keras_efficient_attn.models.keras_hub_internals import (
    refuse_other_masks,
)
from keras_efficient_attn.ops.common.checks import is_positive_int

# The name in a pattern for layers that keep softmax.
FULL = "full"
# The model, not the specification, determines these arguments.
MODEL_ARGUMENTS = {
    *inspect.signature(EfficientAttention).parameters,
    *("name", "dtype", "trainable"),
} - {"seed"}


def normalize_spec(attention):
    """A name or a configuration, serialisable to JSON, or a list of these.

    Args:
        attention: As for `convert_backbone`.

    Raises:
        TypeError: If `attention` is of another kind.
    """
    if isinstance(attention, list | tuple):
        return [_normalize_one(spec) for spec in attention]
    return _normalize_one(attention)


def is_pattern(attention):
    """Whether it is a dict of names to numbers of layers, not a configuration."""
    return isinstance(attention, dict) and "class_name" not in attention


def expand_pattern(pattern, count):
    """The replacements and layers of a pattern: `(attention, layers)`.

    Args:
        pattern: Dict of names to numbers of layers, in the order of the model; repeated
            from the start at its end. `"full"` layers keep softmax.
        count: Number of self-attention layers of the model.

    Raises:
        ValueError: If the pattern does not map names to positive integers, or replaces
            no layer.
    """
    names = []
    for name, number in pattern.items():
        if not isinstance(name, str) or not is_positive_int(number):
            raise ValueError(
                "`attention`, as a pattern, must be a dict of names to positive "
                f"integers. Received: attention={pattern!r}"
            )
        names += [name] * number
    layers = [i for i in range(count) if names and names[i % len(names)] != FULL]
    if not layers:
        raise ValueError(
            f"The pattern replaces none of the {count} self-attention layers. "
            f"Received: attention={pattern!r}"
        )
    return [names[i % len(names)] for i in layers], layers


def make_adapter(spec, site):
    """The adapter for a site, with its efficient layer; not built and not installed.

    Args:
        spec: The specification of one layer, from `ConversionTargets.specs`.
        site: An `AttentionSite`.

    Raises:
        ValueError: If the layer cannot replace the model's.
    """
    layer_class, options = _class_and_options(spec)
    where = f"{layer_class.__name__} cannot take the place of {site.layer.path}"
    reason = _refusal(layer_class, options, site)
    if reason is not None:
        raise ValueError(f"{where}: {reason}")
    config = {**site.adapter_class.geometry(site.layer), **options}
    try:
        # A name's options are arguments; a configuration's options are serialized.
        attention = (
            layer_class(**config)
            if isinstance(spec, str)
            else layer_class.from_config(config)
        )
        x = keras.KerasTensor((None, None, attention.key_dim))
        attention.compute_output_spec(x, x, use_causal_mask=site.is_causal)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from error
    return site.adapter_class(attention, site)


def _normalize_one(attention):
    layer_class = keras.layers.MultiHeadAttention
    if isinstance(attention, type) and issubclass(attention, layer_class):
        # The model determines its sizes.
        attention = attention(num_heads=1, key_dim=2)
    return attention_spec(attention)


def _class_and_options(spec):
    if isinstance(spec, str):
        layer_class, options = parse_attention(spec)
        taken = sorted(MODEL_ARGUMENTS & set(options))
        if taken:
            raise ValueError(
                f"The model determines these options: leave out {', '.join(taken)}. "
                f"Received: attention={spec!r}"
            )
        if "qk_norm" in inspect.signature(layer_class).parameters:
            # Keep the norms of the trained queries and keys.
            options.setdefault("qk_norm", False)
        return layer_class, options
    layer = keras.saving.deserialize_keras_object(spec)
    config = layer.get_config()
    return type(layer), {k: v for k, v in config.items() if k not in MODEL_ARGUMENTS}


def _refusal(layer_class, options, site):
    if not issubclass(layer_class, EfficientAttention):
        return "only an `EfficientAttention` can, and not softmax."
    refusal = layer_class.conversion_refusal(options)
    if refusal is not None:
        return refusal
    if site.adapter_class.always_causal and options.get("rotary_wavelength"):
        return (
            "the model rotates queries and keys itself: leave out `rotary_wavelength`. "
            f"Received: rotary_wavelength={options['rotary_wavelength']}"
        )
    return None if site.is_converted else site.adapter_class.refusal(site.layer)


@dataclasses.dataclass(frozen=True)
class ConversionTargets:
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
        count = len(self.indices)
        if isinstance(self.attention, list) and len(self.attention) != count:
            raise ValueError(
                f"`attention`, as a list, must have one entry for each of the {count} "
                f"layers that are replaced. Received: a list of {len(self.attention)}"
            )
        for stack in self.shared_stacks:
            kept = [index for index in stack if index not in self.indices]
            if len(kept) < len(stack) and not all(
                self.sites[index].is_converted for index in kept
            ):
                raise ValueError(
                    "The layers of a stack share the bias of their logits by distance, "
                    f"and must be replaced together: pass all of {stack} of "
                    f"{self.model.name}. "
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
        if isinstance(self.attention, list):
            return self.attention
        return [self.attention] * len(self.indices)

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


def choose_targets(model, attention, layers=None):
    """The targets of a conversion; the model does not change.

    Args:
        model: A built model or layer.
        attention: As for `convert_backbone`.
        layers: Indices of self-attention layers, or `None` for all. Must be `None` with
            a pattern, which selects the layers itself.

    Returns:
        `ConversionTargets`.

    Raises:
        ValueError: If the model has no layer that can be replaced, or not these layers,
            or if the list of attentions and the layers differ in length.
        TypeError: If `attention` is not an attention specification.
    """
    sites = tuple(find_sites(model))
    if is_pattern(attention):
        if layers is not None:
            raise ValueError(
                "A pattern as `attention` already says which layers it replaces: leave "
                f"out `layers`. Received: attention={attention!r}, layers={layers!r}"
            )
        attention, layers = expand_pattern(attention, len(sites))
    attention = normalize_spec(attention)
    return ConversionTargets(model, sites, attention, _check_layers(layers, len(sites)))


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
        indices = list(layers)
    except TypeError:
        indices = [None]
    if not indices or not all(
        isinstance(index, numbers.Integral)
        and not isinstance(index, bool)
        and 0 <= index < count
        for index in indices
    ):
        raise ValueError(
            "`layers` must be None or the indices of self-attention layers, from 0 to "
            f"{count - 1}. Received: layers={layers!r}"
        )
    return sorted({int(index) for index in indices})
