"""OLMo Hybrid: the gated delta rule, with softmax attention in every fourth layer.

Blocks with the delta rule are pre-norm; those with softmax attention normalise the
updates, and queries and keys over all heads.
"""

import numpy as np

from keras_efficient_attn.layers import (
    GatedDeltaAttention,
    OutputNorm,
    SoftmaxAttention,
)
from keras_efficient_attn.models.checkpoints.linear import (
    block_weights,
    gate_weights,
    outer_weights,
    projection_weights,
    rate_weights,
    unit_features,
)
from keras_efficient_attn.models.checkpoints.settings import Settings
from keras_efficient_attn.models.checkpoints.weights import plain

# Of the initial weights and of training; positions have no limit.
WITHOUT_EFFECT = """
    attention_dropout linear_a_log_max linear_a_log_min linear_dt_init_floor
    linear_dt_max linear_dt_min max_position_embeddings
""".split()
LINEAR, FULL = "linear_attention", "full_attention"
# The published code's, whatever the configuration says.
OUTPUT_NORM_EPSILON = 1e-5
# A tensor has two names: those of the files, and those of transformers' modules.
LINEAR_NORMS = (
    "attention_layer_norm input_layernorm",
    "feedforward_layer_norm post_attention_layernorm",
)
FULL_NORMS = (
    "post_attention_layernorm feedforward_layer_norm",
    "post_feedforward_layernorm",
)


class OlmoHybrid:
    """The family `olmo_hybrid`."""

    def arguments(self, config):
        """The arguments of `EfficientTransformerBackbone` for a configuration."""
        settings = Settings(config, WITHOUT_EFFECT)
        width = settings.size("hidden_size", 3840)
        heads = settings.size("num_attention_heads", 30)
        epsilon = settings.get("rms_norm_eps", 1e-6)
        activation = settings.activation("hidden_act", "silu")
        bias = settings.get("attention_bias", False)
        num_layers = settings.size("num_hidden_layers", 32)
        kinds = settings.get("layer_types", None) or [
            FULL if i % 4 == 3 or num_layers < 4 and i + 1 == num_layers else LINEAR
            for i in range(num_layers)
        ]
        if len(kinds) != num_layers or not {LINEAR, FULL} >= set(kinds):
            raise ValueError(
                f"`layer_types` of config.json must be a list of {num_layers} names, "
                f"{LINEAR!r} or {FULL!r}. Received: layer_types={kinds}"
            )
        shared = settings.get("num_key_value_heads", None) or heads
        softmax = SoftmaxAttention(
            heads,
            settings.get("head_dim", None) or width // heads,
            num_key_value_heads=None if shared == heads else shared,
            projection_norm="rms",
            projection_norm_epsilon=epsilon,
            rotary_wavelength=_rotary_wavelength(settings),
            use_bias=bool(bias),
        )
        layers = {LINEAR: _delta(settings, width, heads, activation), FULL: softmax}
        residuals = {LINEAR: "pre_norm", FULL: "update_norm"}
        tied = settings.get("tie_word_embeddings", False)
        arguments = dict(
            vocabulary_size=settings.get("vocab_size", 100352),
            num_layers=num_layers,
            num_heads=heads,
            head_dim=softmax.key_dim,
            hidden_dim=width,
            intermediate_dim=settings.get("intermediate_size", 11008),
            attention=[layers[kind] for kind in kinds],
            residual=dict(
                kind=tuple(residuals[kind] for kind in kinds),
                norm="rms_norm",
                norm_epsilon=epsilon,
            ),
            feed_forward=dict(activation=activation, gated=True),
            embedding="tied" if tied else "untied",
            use_bias=False,
        )
        settings.finish()
        return arguments

    def backbone_weights(self, backbone, config):
        """The list of `Weight` of a backbone."""
        weights = outer_weights(backbone, config, "model.embed_tokens.weight")
        for i, block in enumerate(backbone.decoder.blocks):
            prefix, attention = f"model.layers.{i}.", block.attention
            if isinstance(attention, SoftmaxAttention):
                own = f"{prefix}self_attn."
                weights += block_weights(block, prefix, FULL_NORMS)
                gains = dict(q=attention._query_norm_scale, k=attention._key_norm_scale)
                weights += [
                    plain(f"{own}{name}_norm.weight", gain)
                    for name, gain in gains.items()
                ]
            else:
                own = f"{prefix}linear_attn."
                weights += block_weights(block, prefix, LINEAR_NORMS)
                weights += gate_weights(attention, own, "o_norm")
                weights += rate_weights(attention, own)
            weights += projection_weights(attention, own)
        return weights

    def ignored(self, config):
        """Names of tensors that the model does not read."""
        tied = config.get("tie_word_embeddings", False)
        return {"lm_head.weight"} if tied else set()

    def files(self, files, weights):
        """The tensors, with convolutions of queries, keys and values apart."""
        return SplitConvolutions(files, weights)


class SplitConvolutions:
    """`TensorFiles` whose short convolutions are cut into queries, keys and values.

    transformers concatenates the three, and cuts them into three of nearly one size
    when it saves: their names do not say what is in them.

    Args:
        files: `TensorFiles`.
        weights: List of `Weight`, with the shapes that they should have.
    """

    def __init__(self, files, weights):
        self._files = files
        self._shapes = {
            name: weight.shape for weight in weights for name in weight.names
        }
        self.names = files.names

    def shape(self, name):
        """The shape of a tensor; of one that is cut, where the sum is right."""
        names = _three_convolutions(name)
        if names is None or not self.names.issuperset(names):
            return self._files.shape(name)
        own, cut = (
            [shape_of(n) for n in names]
            for shape_of in (self._files.shape, self._shapes.get)
        )
        same = sum(s[0] for s in own) == sum(s[0] for s in cut)
        return cut[names.index(name)] if same else self._files.shape(name)

    def read(self, name):
        """A tensor, a NumPy array."""
        names = _three_convolutions(name)
        if names is None:
            return self._files.read(name)
        whole = np.concatenate([self._files.read(n) for n in names])
        sizes = [self._shapes[n][0] for n in names]
        start = sum(sizes[: names.index(name)])
        return whole[start : start + sizes[names.index(name)]]


def _three_convolutions(name):
    """The names of the convolutions beside one, or `None`."""
    prefix, _, last = name.rpartition("linear_attn.")
    if not last.endswith("_conv1d.weight"):
        return None
    return [f"{prefix}linear_attn.{x}_conv1d.weight" for x in "qkv"]


def _rotary_wavelength(settings):
    """The longest wavelength of rotary positions; `None` where the file has a null."""
    # Older files have these two beside it.
    theta = settings.get("rope_theta", 10000.0)
    settings.only("rope_scaling", None, (None,))
    rope = settings.get("rope_parameters", None) or {}
    own = Settings({"model_type": "rope_parameters", **rope})
    own.only("rope_type", "default", ("default",))
    own.only("partial_rotary_factor", 1.0, (1.0, None))
    theta = own.get("rope_theta", theta)
    own.finish()
    return theta


def _delta(settings, width, heads, activation):
    keys = settings.get("linear_num_key_heads", None) or heads
    values = settings.get("linear_num_value_heads", None) or heads
    settings.only("linear_use_gate", True, (True,))
    dim = settings.get("linear_key_head_dim", None) or int(0.75 * width / keys)
    return GatedDeltaAttention(
        keys,
        num_value_heads=None if values == keys else values,
        key_dim=dim,
        value_dim=settings.get("linear_value_head_dim", None) or 2 * dim,
        max_beta=2.0 if settings.get("linear_allow_neg_eigval", True) else 1.0,
        convolution=settings.get("linear_conv_kernel_dim", 4),
        activation=activation,
        feature_map=unit_features(dim),
        output_norm=OutputNorm("rms", epsilon=OUTPUT_NORM_EPSILON),
        output_gate="silu",
        use_bias=False,
    )
