"""Adapters that give efficient attention the call interface of replaced layers."""

import types

import keras
from keras import ops

from keras_efficient_attn.layers.keras_internals import (
    is_called_alone,
    projections,
    set_projection,
    tracked_layers,
)
from keras_efficient_attn.models.keras_hub_internals import (
    require_from_hub,
    t5_bias_weights,
)
from keras_efficient_attn.ops.common.backend import is_traced, shape_of

# The last of T5's buckets has all distances from this on.
FAR = 128


class AttentionAdapter(keras.layers.Layer):
    """An efficient layer that replaces a trained attention layer, the host.

    The adapter has the host's name and the host's projection layers themselves, not
    copies, so that their weights, paths, precision, quantisation and LoRA stay. It
    accepts the arguments that the surrounding block passes. It holds an
    `EfficientAttention`, which computes the heads with the adapter's projections and
    has none of its own.

    Args:
        attention: An `EfficientAttention` that is not built, made from `geometry`.
        site: The `AttentionSite` of the attention layer to replace, built; or of its
            adapter.
    """

    # Whether every block around such a host passes causal masks.
    always_causal = False
    # Whether the masks of the blocks may hide keys far back.
    hides_far_keys = False
    # Whether the layers of a stack share what they compute, and go together.
    shares_with_stack = False

    def __init__(self, attention, site):
        host = site.layer
        # autocast=False: the projections cast their inputs.
        super().__init__(
            name=host.name,
            dtype=host.dtype_policy,
            trainable=host.trainable,
            autocast=False,
        )
        self.is_causal = site.is_causal
        self._stream = types.SimpleNamespace(position=0)
        # First, so that the weights have the host's order.
        self.adopt_projections(host)
        self.attention = attention

    @classmethod
    def geometry(cls, host):
        """The arguments of an `EfficientAttention` that the host determines."""
        held = projections(host)
        heads, key_dim = held["query"].partial_output_shape[-2:]
        groups, value_dim = held["value"].partial_output_shape[-2:]
        return {
            "num_heads": heads,
            "key_dim": key_dim,
            "value_dim": value_dim,
            "num_key_value_heads": None if groups == heads else groups,
            "dropout": held["dropout"].rate,
            "use_bias": held["query"].bias_axes is not None,
            "use_gate": "gate" in held,
            "name": "efficient_attention",
            "dtype": host.dtype_policy,
            "trainable": host.trainable,
        }

    @classmethod
    def refusal(cls, host):
        """Why a layer of the right class cannot be replaced, or `None`."""
        return None

    def adopt_projections(self, host):
        """Takes over the projections of the host, and what gives it positions."""
        held = projections(host)
        # In the order of the host, which its weights have.
        order = {id(layer): index for index, layer in enumerate(tracked_layers(host))}
        for name in sorted(held, key=lambda name: order[id(held[name])]):
            set_projection(self, name, held[name])
        self._host_build_config = host.get_build_config()

    def get_build_config(self):
        return self._host_build_config

    def build(self, *args, **kwargs):
        """Builds the layer for inputs of the shape that the host was built for."""
        held = projections(self)
        for name in ("query", "key"):
            set_projection(self.attention, name, self._with_positions(held, name))
        for name in ("value", "gate", "output"):
            if name in held:
                # A function, so that `attention` does not track the projection.
                set_projection(self.attention, name, self.projection(held[name], name))
        set_projection(self.attention, "dropout", held["dropout"])
        # It builds its own weights only.
        self.attention._build_projections = lambda *shapes: None
        config = self._host_build_config
        if "input_shape" in config:
            self.attention.build(config["input_shape"], config["input_shape"])
        else:
            self.attention.build(**config["shapes_dict"])

    def _with_positions(self, held, name):
        """The projection of queries or keys, with their norm and positions."""
        norm = held.get(f"{name}_norm")
        projection = self.projection(held[name], name)

        def project(x):
            heads = projection(x) if norm is None else norm(projection(x))
            steps = ops.arange(shape_of(x)[1], dtype="int32")[None]
            return self.add_positions(heads, self._stream.position + steps)

        return project

    def projection(self, layer, name):
        """The function of a projection of the host, for `attention`.

        Args:
            layer: The layer.
            name: `"query"`, `"key"`, `"value"`, `"gate"` or `"output"`.
        """
        return layer.__call__

    def add_positions(self, heads, positions):
        """Projected queries or keys `(batch, length, heads, key_dim)`, with positions.

        Args:
            heads: The projected queries or keys.
            positions: Integers `(1 or batch, length)`.
        """
        return heads

    # Saved files store the projections under these names of Keras.
    query_dense = property(lambda self: projections(self)["query"])
    key_dense = property(lambda self: projections(self)["key"])
    value_dense = property(lambda self: projections(self)["value"])
    output_dense = property(lambda self: projections(self)["output"])

    @staticmethod
    def key_mask(mask):
        """`(batch, 1, length)` of a causal `(batch, length, length)` mask."""
        # The last query sees every key that is not padding.
        return mask[:, -1:]

    def check_mask(self, x, mask, causal=False):
        """Checks the mask of a causal call, which the layer takes for causality.

        Blocks pass causality and padding only, so that their masks are not compared.

        Args:
            x: `(batch, length, dim)`, the queries' inputs.
            mask: `(batch, length or 1, keys)`, or `None`: all keys.
            causal: Whether the call adds causality to the mask.

        Returns:
            `x`; in a compiled program, which cannot raise, NaN for another mask.

        Raises:
            ValueError: For another mask, if no block calls the layer.
        """
        if not is_called_alone(self):
            return x
        received = "None" if mask is None else f"shape {tuple(mask.shape)}"
        message = (
            "Efficient attention of a causal block supports the masks of causality and "
            "padding only, and no other that differs between queries. Call the block "
            "instead of the layer, or pass an `attention_mask` (batch, length, length) "
            f"of these two. Received: attention_mask={received}, in a direct call of "
            f"{self.path}"
        )
        if isinstance(x, keras.KerasTensor):
            raise ValueError(f"{message}, with symbolic inputs")
        length = shape_of(x)[1]
        if mask is None:
            mask = ops.ones((1, length, length), "bool")
        mask = ops.cast(mask, "bool")
        keys = shape_of(mask)[2]
        mask = ops.broadcast_to(mask, (shape_of(mask)[0], length, keys))
        distances = ops.arange(length)[:, None] - ops.arange(keys)
        applied = ops.logical_and(distances >= 0, self.key_mask(mask))
        if causal:
            mask = ops.logical_and(mask, distances >= 0)
        agrees = ops.equal(mask, applied)
        if self.hides_far_keys:
            seen = ops.max(ops.where(mask, distances, -1))
            far = ops.logical_and(distances > seen, ops.logical_not(mask))
            agrees = ops.logical_or(agrees, far)
        holds = ops.all(agrees)
        if is_traced(holds):
            return ops.where(holds, x, ops.cast(float("nan"), x.dtype))
        if not holds:
            raise ValueError(message)
        return x

    def stream(self, x, state, position, key_mask):
        """The next positions of a causal sequence.

        Args:
            x: `(batch, length, dim)`, the inputs of the host.
            state: Dict of tensors, from `attention.get_initial_state` or the last call.
            position: The positions that each row has read, integers `(batch,)`.
            key_mask: Boolean `(batch, length)` or `None`.

        Returns:
            `(output, state)`.
        """
        self._stream.position = position[:, None]
        try:
            return self.attention(
                x, x, key_mask=key_mask, use_causal_mask=True, state=state
            )
        finally:
            self._stream.position = 0

    def outputs_with_cache(self, output, cache):
        """The outputs of a call of the host with a cache."""
        return output, cache

    def _refuse_cache(self, cache):
        if cache is not None:
            raise ValueError(
                f"{self.name} does not support `cache`: efficient attention has a "
                "state instead of a cache of keys and values. Call `generate` of a "
                "KerasHub task, which passes the states on. Received: "
                f"cache.shape={tuple(cache.shape)}"
            )


class MultiHeadAdapter(AttentionAdapter):
    """For `keras.layers.MultiHeadAttention` and KerasHub's with a cache."""

    def __init__(self, attention, site):
        super().__init__(attention, site)
        self.supports_masking = True

    @classmethod
    def refusal(cls, host):
        shape = host.get_build_config()["shapes_dict"]["query_shape"]
        if len(shape) != 3:
            return (
                "efficient attention reads one sequence in each row, (batch, length, "
                "dim), and the model gives the layer inputs with other axes. Received: "
                f"query shape {tuple(shape)}"
            )
        return None

    @classmethod
    def geometry(cls, host):
        layer = host.attention if isinstance(host, AttentionAdapter) else host
        host_config = layer.get_config()
        kept = {name: host_config[name] for name in ("output_shape", "seed")}
        return kept | super().geometry(host)

    def call(
        self,
        query,
        value,
        key=None,
        query_mask=None,
        value_mask=None,
        key_mask=None,
        attention_mask=None,
        return_attention_scores=False,
        training=None,
        use_causal_mask=False,
        state=None,
        cache=None,
        cache_update_index=None,
    ):
        self._refuse_cache(cache)
        if self._is_square(attention_mask):
            query = self.check_mask(query, attention_mask, use_causal_mask)
        masks = self._masks(attention_mask, use_causal_mask)
        masks |= dict(query_mask=query_mask, value_mask=value_mask, key_mask=key_mask)
        options = dict(return_attention_scores=return_attention_scores, state=state)
        return self.attention(query, value, key, training=training, **masks, **options)

    def _masks(self, attention_mask, use_causal_mask):
        """The masks for `attention`."""
        if self._is_square(attention_mask):
            attention_mask, use_causal_mask = self.key_mask(attention_mask), True
        return {"attention_mask": attention_mask, "use_causal_mask": use_causal_mask}

    def _is_square(self, attention_mask):
        """Whether a mask is that of a causal block, for several tokens."""
        # One row of keys: a block that is not causal, or a single token.
        one_row = attention_mask is None or attention_mask.shape[-2] == 1
        return self.is_causal and not one_row

    def compute_mask(self, query, value, query_mask=None, *args, **kwargs):
        return query_mask

    def compute_output_spec(
        self,
        query,
        value,
        *args,
        attention_mask=None,
        use_causal_mask=False,
        cache=None,
        cache_update_index=None,
        **kwargs,
    ):
        if self._is_square(attention_mask):
            self.check_mask(query, attention_mask, use_causal_mask)
        kwargs |= self._masks(attention_mask, use_causal_mask)
        return self.attention.compute_output_spec(query, value, *args, **kwargs)


class RotaryAdapter(AttentionAdapter):
    """For the grouped-query attention of Llama, Qwen and others, which rotates."""

    always_causal = True
    # The host's attribute that applies the rotation.
    rotary_attribute = "rotary_embedding_layer"

    def adopt_projections(self, host):
        rotary = require_from_hub(host, self.rotary_attribute)
        setattr(self, self.rotary_attribute, rotary)
        super().adopt_projections(host)

    def call(
        self,
        hidden_states,
        attention_mask=None,
        cache=None,
        training=None,
        **cache_options,
    ):
        # KerasHub also says which places of a cache a call fills.
        self._refuse_cache(cache)
        hidden_states = self.check_mask(hidden_states, attention_mask)
        if attention_mask is not None:
            attention_mask = self.key_mask(attention_mask)
        return self.attention(
            hidden_states,
            hidden_states,
            attention_mask=attention_mask,
            training=training,
            use_causal_mask=True,
        )

    def compute_output_spec(self, hidden_states, attention_mask=None, *args, **kwargs):
        self.check_mask(hidden_states, attention_mask)
        return keras.KerasTensor(hidden_states.shape, dtype=self.compute_dtype)

    def add_positions(self, heads, positions):
        return self.rotary_embedding_layer(heads, positions=positions)


class MistralAdapter(RotaryAdapter):
    """For Mistral's and Mixtral's attention, whose mask may hide keys far back."""

    hides_far_keys = True

    @staticmethod
    def key_mask(mask):
        # A query that is not padding sees itself.
        return ops.diagonal(mask, axis1=-2, axis2=-1)[:, None]


class Gemma3Adapter(RotaryAdapter):
    """For the attention of Gemma 3 without images."""

    rotary_attribute = "rope_layer"

    @classmethod
    def refusal(cls, host):
        if require_from_hub(host, "logit_soft_cap") is not None:
            return (
                "the layer caps its logits with a tanh, and no efficient layer does. "
                f"Received: logit_soft_cap={host.logit_soft_cap}"
            )
        if not require_from_hub(host, "query_head_dim_normalize"):
            return (
                "the layer scales its logits by the model's width instead of the "
                "heads'. Received: query_head_dim_normalize=False"
            )
        if getattr(host, "use_bidirectional_attention", False):
            return (
                "only causal blocks are supported here. Received: "
                "use_bidirectional_attention=True"
            )
        return None

    def add_positions(self, heads, positions):
        return self.rope_layer(heads, positions=positions)


class GemmaAdapter(Gemma3Adapter):
    """For Gemma's attention, whose rotation interleaves its halves."""

    def add_positions(self, heads, positions):
        shape = shape_of(heads)
        halves = ops.split(self.rope_layer(heads, positions=positions), 2, axis=-1)
        return ops.reshape(ops.stack(halves, axis=-1), shape)


class T5Adapter(AttentionAdapter):
    """For T5's self-attention, whose logits have a bias by distance.

    The first layer of a stack has the weights of the bias, and gives the others the
    bias of all pairs, with the mask. Here each layer adds it in its window only. So the
    layers of a stack are replaced together, and none gives another a bias.
    """

    shares_with_stack = True

    def __init__(self, attention, site):
        super().__init__(attention, site)
        if not attention.takes_window_bias:
            raise ValueError(
                f"{site.layer.path} adds a bias by distance to its logits: use a layer "
                "with a window, local, linear, performer or vq. Received: a "
                f"{type(attention).__name__} without a window"
            )
        if site.bias_weights is None:
            raise ValueError(
                "The first layer of the stack holds the bias of this layer's logits, "
                "and is not being converted: convert the whole model. "
                f"Received: {site.layer.path}"
            )
        attention.window_bias = self._bias
        # In a namespace: another layer of the stack owns the variable.
        self._shared = types.SimpleNamespace(bias_weights=site.bias_weights)

    @classmethod
    def geometry(cls, host):
        return {
            "num_heads": require_from_hub(host, "num_heads"),
            "key_dim": require_from_hub(host, "key_value_dim"),
            "dropout": projections(host)["dropout"].rate,
            "use_bias": False,
            "name": "efficient_attention",
            "dtype": host.dtype_policy,
            "trainable": host.trainable,
        }

    def adopt_projections(self, host):
        self.num_heads, self.key_value_dim = host.num_heads, host.key_value_dim
        bias_weights = t5_bias_weights(host)
        if bias_weights is not None:
            self.relative_attention_bias = bias_weights
        super().adopt_projections(host)

    def projection(self, layer, name):
        if name == "output":
            return lambda heads: layer(ops.reshape(heads, (*shape_of(heads)[:2], -1)))
        # T5 does not scale its logits, and `EfficientAttention` does.
        factor = self.key_value_dim**0.5 if name == "query" else 1.0

        def project(x):
            shape = (*shape_of(x)[:2], self.num_heads, self.key_value_dim)
            return factor * ops.reshape(layer(x), shape)

        return project

    def call(
        self,
        hidden_states,
        mask=None,
        key_value_states=None,
        position_bias=None,
        cache=None,
        cache_update_index=None,
        training=None,
    ):
        self._refuse_cache(cache)
        if self.is_causal and position_bias is None:
            hidden_states = self.check_mask(hidden_states, mask)
        if self.is_causal and mask is not None and mask.shape[-2] != 1:
            if position_bias is not None:
                # Blocks after the first do not add causality to their mask.
                raise ValueError(
                    "Efficient attention cannot apply a mask that differs between "
                    "queries, other than causality. Pass a mask over keys, `(batch, 1, "
                    f"length)`. Received: attention_mask.shape={tuple(mask.shape)}, in "
                    f"{self.path}"
                )
            mask = self.key_mask(mask)
        output = self.attention(
            hidden_states,
            hidden_states,
            attention_mask=mask,
            training=training,
            use_causal_mask=self.is_causal,
        )
        return self.outputs_with_cache(output, None)

    def compute_output_spec(self, hidden_states, *args, **kwargs):
        output = keras.KerasTensor(hidden_states.shape, dtype=self.compute_dtype)
        bias = keras.KerasTensor((1, self.num_heads, 0, 0), dtype=self.compute_dtype)
        return output, bias, None

    def outputs_with_cache(self, output, cache):
        # No pairs: the blocks pass it on, and softmax cannot read it.
        bias = ops.zeros((1, self.num_heads, 0, 0), self.compute_dtype)
        return output, bias, cache

    def _bias(self, distances):
        weights = ops.convert_to_tensor(self._shared.bias_weights)
        buckets = bucket_distances(distances, weights.shape[0], self.is_causal)
        return ops.take(weights, buckets, axis=0)


def bucket_distances(distances, count, causal):
    """T5's buckets of distances, integers of the shape of `distances`.

    Half of the buckets of a direction are of one distance each; the others grow with
    its logarithm, and the last has all from `FAR` on. A causal stack has one direction.

    Args:
        distances: Integer array, query position - key position.
        count: Number of buckets.
        causal: Whether the stack is a decoder.

    Reference:
        - [Raffel et al., 2020](https://arxiv.org/abs/1910.10683)
    """
    distances = ops.convert_to_tensor(distances, "int32")
    first = ops.zeros_like(distances)
    if causal:
        distances = ops.maximum(distances, 0)
    else:
        count = count // 2
        first = ops.where(distances < 0, count, 0)
        distances = ops.abs(distances)
    single = count // 2
    # In float32, as T5: distances at the edge of a bucket depend on the rounding.
    ratio = ops.log(ops.cast(distances, "float32") / float(single))
    ratio = ratio / ops.cast(ops.log(FAR / single), "float32")
    wide = single + ops.cast(ratio * (count - single), "int32")
    wide = ops.minimum(wide, count - 1)
    return first + ops.where(distances < single, distances, wide)
