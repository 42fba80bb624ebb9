"""Efficient layers that stand where softmax stood, with its projections and call."""

import functools
import inspect

import keras
from keras import ops

from keras_efficient_attn.layers.attention.base import AttentionCall, EfficientAttention

# What all attention layers that can be replaced hold, in the order of their weights.
KEPT_LAYERS = {
    "query": "query_dense",
    "key": "key_dense",
    "gate": "gate_dense",
    "value": "value_dense",
    "dropout": "dropout_layer",
    "output": "output_dense",
}


def kept_layers(layer):
    """The projections, and the dropout, of an attention layer: a dict."""
    found = {}
    for name, attribute in KEPT_LAYERS.items():
        kept = getattr(layer, f"_{attribute}", None)
        kept = getattr(layer, attribute, None) if kept is None else kept
        if kept is not None:
            found[name] = kept
    return found


class StandIn(EfficientAttention):
    """Base of layers that stand where softmax attention stood.

    A stand-in holds the projections of the layer that it replaced, themselves and not
    copies, so that their weights, paths, precision, quantisation and LoRA stay; and it
    takes the arguments that the block around it passes. Its other base is an
    `EfficientAttention`, which computes the heads.
    """

    # Whether the block around passes a mask that hides later keys from a query.
    receives_causal_mask = False

    @classmethod
    def geometry(cls, layer):
        """The arguments of the constructor that the replaced layer decides."""
        kept = kept_layers(layer)
        heads, key_dim = kept["query"].partial_output_shape[-2:]
        groups, value_dim = kept["value"].partial_output_shape[-2:]
        geometry = {
            "num_heads": heads,
            "key_dim": key_dim,
            "value_dim": value_dim,
            "num_key_value_heads": None if groups == heads else groups,
            "dropout": kept["dropout"].rate,
            "use_bias": kept["query"].bias_axes is not None,
            "use_gate": "gate" in kept,
        }
        return geometry | {
            "name": layer.name,
            "dtype": layer.dtype_policy,
            "trainable": layer.trainable,
        }

    @classmethod
    def refusal(cls, layer):
        """Why a layer of the right class cannot be replaced, or `None`."""
        return None

    def take_over(self, layer):
        """Builds this layer with the projections of another one."""
        for name, kept in kept_layers(layer).items():
            setattr(self, f"_{KEPT_LAYERS[name]}", kept)
        config = layer.get_build_config()
        if "input_shape" in config:
            self.build(config["input_shape"], config["input_shape"])
        else:
            self.build(**config["shapes_dict"])

    def _build_projections(self, query_shape, value_shape, key_shape):
        """They are the other layer's."""

    def _query_and_key(self, query, key, call, start=0):
        return self._projected_query(query, start), self._projected_key(key, start)

    def _projected_query(self, query, start=0):
        return self._with_positions(self._query_dense(query), start)

    def _projected_key(self, key, start=0):
        return self._with_positions(self._key_dense(key), start)

    def _with_positions(self, x, start):
        """Projected queries or keys, with what the model tells them of positions."""
        return x

    @staticmethod
    def mask_of_keys(mask):
        """`(batch, 1, length)` of a causal `(batch, length, length)` mask."""
        # The last query sees every key that is no padding.
        return mask[:, -1:]

    def _call_with_cache(self, x, cache, start, attention_mask):
        """KerasHub's generation: a cache of keys and values, of a fixed length.

        Args:
            x: `(batch, length, dim)`, the next positions.
            cache: `(batch, 2, capacity, heads, key_dim)`.
            start: Position of the first of them.
            attention_mask: `(batch, length, capacity)` or `None`. Of its last row the
                padding is read.

        Returns:
            `(output, cache)`.
        """
        if start is None:
            raise ValueError(
                "`cache` needs `cache_update_index`, the position of the first "
                "query. Received: cache_update_index=None"
            )
        query, key = self._query_and_key(x, x, None, start)
        value = self._value_dense(x)
        at = [0, start, 0, 0]
        key = ops.slice_update(cache[:, 0], at, ops.cast(key, cache.dtype))
        value = ops.slice_update(cache[:, 1], at, ops.cast(value, cache.dtype))
        cache = ops.stack((key, value), axis=1)
        key, value = self._for_query_heads(key), self._for_query_heads(value)
        key_mask = None
        if attention_mask is not None:
            key_mask = ops.cast(attention_mask[:, -1], "bool")
            key_mask = ops.broadcast_to(key_mask, ops.shape(key)[:2])
        # Positions to come are hidden by causality.
        if query.shape[1] is not None and query.shape[1] == key.shape[1]:
            call = AttentionCall(key_mask=key_mask, causal=True)
            heads, _ = self.attend(query, key, value, call)
        else:
            heads = self.attend_at(start, query, key, value, key_mask)
        return self._project(heads, x, None), cache


class MultiHeadStandIn(StandIn):
    """For `keras.layers.MultiHeadAttention` and KerasHub's with a cache."""

    @classmethod
    def geometry(cls, layer):
        # An efficient layer sees what its own options say.
        unread = {"self", "kwargs", "attention_axes", "sliding_window"}
        arguments = inspect.signature(keras.layers.MultiHeadAttention.__init__)
        names = set(arguments.parameters) - unread
        config = layer.get_config()
        kept = {name: config[name] for name in names & set(config)}
        return kept | super().geometry(layer)

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
        if cache is not None:
            return self._call_with_cache(
                query, cache, cache_update_index, attention_mask
            )
        if self._is_causal(attention_mask):
            attention_mask = self.mask_of_keys(attention_mask)
            use_causal_mask = True
        return super().call(
            query,
            value,
            key,
            query_mask,
            value_mask,
            key_mask,
            attention_mask,
            return_attention_scores,
            training,
            use_causal_mask,
            state,
        )

    def _is_causal(self, attention_mask):
        """Whether a mask is one that the block made causal."""
        # One row of keys: a block that was told not to be causal, or a single token.
        one_row = attention_mask is None or attention_mask.shape[-2] == 1
        return self.receives_causal_mask and not one_row

    def compute_output_spec(
        self, query, value, *args, cache=None, cache_update_index=None, **kwargs
    ):
        if self._is_causal(kwargs.get("attention_mask")):
            kwargs |= {"attention_mask": None, "use_causal_mask": True}
        output = super().compute_output_spec(query, value, *args, **kwargs)
        return output if cache is None else (output, cache)


class RotaryStandIn(StandIn):
    """For the grouped-query attention of Llama, Qwen and Mistral, which rotates."""

    receives_causal_mask = True
    # The attribute of the replaced layer that rotates.
    rotary_attribute = "rotary_embedding_layer"

    def take_over(self, layer):
        setattr(self, self.rotary_attribute, getattr(layer, self.rotary_attribute))
        super().take_over(layer)

    def call(
        self,
        hidden_states,
        attention_mask=None,
        cache=None,
        cache_update_index=None,
        training=None,
    ):
        x = hidden_states
        if cache is not None:
            return self._call_with_cache(
                x, cache, cache_update_index, self._mask_of_cache(attention_mask)
            )
        if attention_mask is not None:
            attention_mask = self.mask_of_keys(attention_mask)
        return super().call(
            x,
            x,
            attention_mask=attention_mask,
            training=training,
            use_causal_mask=True,
        )

    def compute_output_spec(
        self,
        hidden_states,
        attention_mask=None,
        cache=None,
        cache_update_index=None,
        training=None,
    ):
        output = keras.KerasTensor(hidden_states.shape, dtype=self.compute_dtype)
        return output if cache is None else (output, cache)

    def _with_positions(self, x, start):
        return self.rotary_embedding_layer(x, start_index=start)

    @staticmethod
    def _mask_of_cache(mask):
        return mask


class MistralStandIn(RotaryStandIn):
    """For Mistral's attention, whose mask may hide keys that are far back."""

    @staticmethod
    def _mask_of_cache(mask):
        # Which keys are padding, and which are far, it does not tell.
        return None

    @staticmethod
    def mask_of_keys(mask):
        # A query that is no padding sees itself.
        return ops.diagonal(mask, axis1=-2, axis2=-1)[:, None]


class GemmaStandIn(RotaryStandIn):
    """For Gemma's attention, whose rotation interleaves its halves."""

    rotary_attribute = "rope_layer"

    @classmethod
    def refusal(cls, layer):
        if layer.logit_soft_cap is not None:
            return (
                "it caps its logits with a tanh, and no efficient layer does. "
                f"Received: logit_soft_cap={layer.logit_soft_cap}"
            )
        if not layer.query_head_dim_normalize:
            return (
                "it scales its logits by the model's width instead of the heads'. "
                "Received: query_head_dim_normalize=False"
            )
        return None

    def _with_positions(self, x, start):
        shape = ops.shape(x)
        halves = ops.split(self.rope_layer(x, start_index=start), 2, axis=-1)
        return ops.reshape(ops.stack(halves, axis=-1), shape)


@functools.cache
def stand_in_class(stand_in, layer_class):
    """An efficient layer's class, made to stand in."""
    name = f"{layer_class.__name__}StandIn"
    return type(name, (stand_in, layer_class), {"__module__": __name__})
