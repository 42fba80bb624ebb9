"""Models of flash-linear-attention: RetNet, GLA, DeltaNet and their relatives.

Blocks are pre-norm, with RMS norms and gated feed-forward networks; they differ in the
attention. Layers that `attn` of the configuration names have softmax attention.
"""

import dataclasses
from collections.abc import Callable

import keras

from keras_efficient_attn.layers import (
    DeltaAttention,
    GatedDeltaAttention,
    GatedLinearAttention,
    KimiDeltaAttention,
    OutputGate,
    OutputNorm,
    RetentionAttention,
    SoftmaxAttention,
    feature_maps,
)
from keras_efficient_attn.models.checkpoints.settings import Settings
from keras_efficient_attn.models.checkpoints.weights import (
    convolution,
    matrix,
    plain,
)

# Added to the squared norm of queries and keys.
NORM_EPSILON = 1e-6
# Choices of kernels and losses, and options that the published code does not read.
WITHOUT_EFFECT = """
    attn_mode fuse_cross_entropy fuse_linear_cross_entropy fuse_norm fuse_swiglu
    max_position_embeddings mode use_gk use_gv use_l2warp use_output_norm
""".split()
SWISH = ("swish", "silu")


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type`.

    Attributes:
        attention: Function of `Settings` and the model's width, which gives the layer
            of a block.
        weights: Function of the attention layer, the prefix of its tensors and the
            configuration, which gives its list of `Weight` but the projections'.
        hidden_size, num_layers, hidden_ratio: Defaults of the configuration.
    """

    attention: Callable
    weights: Callable
    hidden_size: int = 2048
    num_layers: int = 24
    hidden_ratio: int = 4

    def arguments(self, config):
        """The arguments of `EfficientTransformerBackbone` for a configuration."""
        settings = Settings(config, WITHOUT_EFFECT)
        width = settings.size("hidden_size", self.hidden_size)
        num_layers = settings.size("num_hidden_layers", self.num_layers)
        epsilon = _epsilon(settings)
        layer = self.attention(settings, width)
        softmax = _softmax_layers(settings, width, num_layers)
        attention = layer
        if softmax:
            attention = [softmax.get(i, layer) for i in range(num_layers)]
        ratio = settings.factor("hidden_ratio", self.hidden_ratio, optional=True) or 4
        intermediate = settings.get("intermediate_size", None)
        if intermediate is None:
            # The next multiple of 256.
            intermediate = -(-int(width * ratio * 2 / 3) // 256) * 256
        settings.only("attnres_block_size", None, (None,))
        activation = settings.activation("hidden_act", "swish", SWISH)
        tied = settings.get("tie_word_embeddings", False)
        arguments = dict(
            vocabulary_size=settings.get("vocab_size", 32000),
            num_layers=num_layers,
            num_heads=layer.get_config()["num_heads"],
            head_dim=layer.key_dim,
            hidden_dim=width,
            intermediate_dim=intermediate,
            attention=attention,
            residual=dict(norm="rms_norm", norm_epsilon=epsilon),
            feed_forward=dict(activation=activation, gated=True),
            embedding="tied" if tied else "untied",
            use_bias=False,
        )
        settings.finish()
        return arguments

    def backbone_weights(self, backbone, config):
        """The list of `Weight` of a backbone."""
        weights = outer_weights(backbone, config, "model.embeddings.weight")
        for i, block in enumerate(backbone.decoder.blocks):
            prefix, attention = f"model.layers.{i}.", block.attention
            weights += block_weights(block, prefix, ("attn_norm", "mlp_norm"))
            weights += projection_weights(attention, f"{prefix}attn.")
            if not isinstance(attention, SoftmaxAttention):
                weights += self.weights(attention, f"{prefix}attn.", config)
        return weights

    def files(self, files, weights):
        """The tensors, as `backbone_weights` names them."""
        return files

    def ignored(self, config):
        """Names of tensors that the model does not read."""
        tied = config.get("tie_word_embeddings", False)
        return {"lm_head.weight"} if tied else set()


def outer_weights(backbone, config, table_name):
    """`Weight` of the embeddings, by this name, of the last norm and of the output."""
    embedding = backbone.token_embedding
    table = embedding.embeddings
    weights = [
        plain(table_name, table, table.shape),
        plain("model.norm.weight", backbone.decoder.final_norm.scale),
    ]
    if not config.get("tie_word_embeddings", False):
        weights.append(matrix("lm_head.weight", embedding.reverse_embeddings))
    return weights


def block_weights(block, prefix, norms):
    """`Weight` of a block's two norms, of these names, and its feed-forward network."""
    layer = block.feed_forward
    residuals = block.attention_residual, block.feed_forward_residual
    weights = [
        plain([f"{prefix}{name}.weight" for name in names.split()], residual.norm.scale)
        for names, residual in zip(norms, residuals, strict=True)
    ]
    layers = dict(gate=layer.hidden, up=layer.gate, down=layer.output_dense)
    for name, dense in layers.items():
        weights.append(matrix(f"{prefix}mlp.{name}_proj.weight", dense))
    return weights


def projection_weights(attention, prefix):
    """`Weight` of the projections of an attention layer."""
    layers = dict(
        q=attention.query_dense, k=attention.key_dense, v=attention.value_dense
    )
    weights = [matrix(f"{prefix}{n}_proj.weight", x) for n, x in layers.items()]
    weights.append(matrix(f"{prefix}o_proj.weight", attention.output_dense, 2))
    for name, layer in {**layers, "o": attention.output_dense}.items():
        if layer.bias is not None:
            weights.append(plain(f"{prefix}{name}_proj.bias", layer.bias))
    return weights


def gate_weights(attention, prefix, norm, low_rank=False):
    """`Weight` of an output gate, the norm of the heads, and short convolutions.

    Args:
        attention: A `GatedStateAttention`.
        prefix: Of the tensors' names.
        norm: Name of the norm.
        low_rank: Whether the gate is two layers.
    """
    weights = []
    for index, layer in enumerate(attention._output_gate_layers):
        name = f"g_proj.{index}" if low_rank else "g_proj"
        weights.append(matrix(f"{prefix}{name}.weight", layer))
        if layer.bias is not None:
            weights.append(plain(f"{prefix}{name}.bias", layer.bias))
    if attention._norm_scale is not None:
        weights.append(plain(f"{prefix}{norm}.weight", attention._norm_scale))
    for name, kernel in attention._convolution_kernels.items():
        weights.append(convolution(f"{prefix}{name[0]}_conv1d.weight", kernel))
    return weights


def rate_weights(attention, prefix, decays=("a_proj",)):
    """`Weight` of β and, if there are any, of decays.

    Args:
        attention: A `DeltaAttention`.
        prefix: Of the tensors' names.
        decays: Names of the layers that decays are made by; empty for none.
    """
    weights = []
    if attention.use_beta:
        weights.append(matrix(f"{prefix}b_proj.weight", attention._beta_layers[0]))
    if decays:
        weights.append(plain(f"{prefix}A_log", attention._log_rate))
        weights.append(plain(f"{prefix}dt_bias", attention._decay_bias))
        layers = zip(decays, attention._decay_layers, strict=True)
        weights += [matrix(f"{prefix}{name}.weight", layer) for name, layer in layers]
    return weights


def unit_features(dim):
    """The map of queries and keys to vectors of norm 1."""
    # The layer's epsilon is added to the mean of the squares.
    return feature_maps.get("unit", epsilon=NORM_EPSILON / dim)


def _softmax_layers(settings, width, num_layers):
    """Layers of softmax attention by number, as `attn` of a configuration says."""
    given = settings.get("attn", None) or []
    layers = {}
    for spec in [given] if isinstance(given, dict) else given:
        own = Settings({"model_type": "attn", **spec}, entry="attn")
        heads = own.size("num_heads", None)
        shared = own.get("num_kv_heads", None) or heads
        layer = SoftmaxAttention(
            heads,
            width // heads,
            num_key_value_heads=None if shared == heads else shared,
            use_bias=bool(own.get("qkv_bias", False)),
            use_output_bias=False,
            rotary_wavelength=own.get("rope_theta", 10000.0),
            sliding_window=own.get("window_size", None),
        )
        numbers = own.get("layers", ())
        for number in numbers if isinstance(numbers, list | tuple) else [None]:
            if number not in range(num_layers) or number in layers:
                raise ValueError(
                    "`layers` of `attn` in config.json must name each layer once, from "
                    f"0 to {num_layers - 1}. Received: layers={spec['layers']}"
                )
            layers[number] = layer
        own.finish()
    return layers


def _short_convolution(settings, default):
    """The size of short convolutions, or `None`."""
    size = settings.get("conv_size", 4)
    used = settings.get("use_short_conv", default)
    if settings.get("share_conv_kernel", None) and used:
        settings.only("share_conv_kernel", False, (False,))
    return size if used else None


def _sizes(settings, width, heads, expand_k, expand_v):
    """Heads, sizes of keys and values, and heads of keys, of `expand_k` and so on."""
    heads = settings.size("num_heads", heads)
    sizes = {
        name: round(width * settings.factor(expand, default) / heads)
        for name, expand, default in (
            ("key_dim", "expand_k", expand_k),
            ("value_dim", "expand_v", expand_v),
        )
    }
    return dict(num_heads=heads, **sizes, use_bias=False)


def _key_value_heads(settings, heads):
    shared = settings.get("num_kv_heads", None)
    return None if shared in (None, heads) else shared


def _epsilon(settings):
    """The epsilon of all norms; `rms_norm_eps` is the name in older files."""
    return settings.get("norm_eps", settings.get("rms_norm_eps", 1e-6))


def _norm(settings):
    """The norm of the heads."""
    scale = bool(settings.get("elementwise_affine", True))
    return OutputNorm("rms", epsilon=_epsilon(settings), scale=scale)


def _delta_options(settings, width, heads, head_dim, expand_v):
    """Arguments that the gated forms of the delta rule share."""
    dim = settings.size("head_dim", head_dim)
    heads = settings.size("num_heads", heads)
    values = settings.get("num_v_heads", None)
    return dict(
        num_heads=heads,
        num_value_heads=None if values in (None, heads) else values,
        key_dim=dim,
        value_dim=int(dim * settings.factor("expand_v", expand_v)),
        max_beta=2.0 if settings.get("allow_neg_eigval", False) else 1.0,
        convolution=_short_convolution(settings, True),
        feature_map=unit_features(dim),
        output_norm=OutputNorm("rms", epsilon=_epsilon(settings)),
        use_bias=False,
    )


def _gated_delta(settings, width):
    gate = settings.activation("output_gate_activation", "swish", (*SWISH, "sigmoid"))
    return GatedDeltaAttention(
        **_delta_options(settings, width, heads=6, head_dim=256, expand_v=2.0),
        output_gate=gate if settings.get("use_gate", True) else None,
    )


def _gated_delta_weights(attention, prefix, config):
    return [
        *gate_weights(attention, prefix, "o_norm"),
        *rate_weights(attention, prefix),
    ]


def _kimi_delta(settings, width):
    options = _delta_options(settings, width, heads=16, head_dim=128, expand_v=1.0)
    # It lets kernels assume the bound.
    settings.get("safe_gate", False)
    return KimiDeltaAttention(
        **options,
        decay_rank=options["value_dim"],
        output_gate=OutputGate("sigmoid", rank=options["value_dim"], bias=True),
        least_log_decay=settings.get("lower_bound", None),
    )


def _kimi_delta_weights(attention, prefix, config):
    return [
        *gate_weights(attention, prefix, "o_norm", low_rank=True),
        *rate_weights(attention, prefix, ("f_proj.0", "f_proj.1")),
    ]


def _delta(settings, width):
    sizes = _sizes(settings, width, heads=16, expand_k=1.0, expand_v=1.0)
    activation = settings.only(
        "qk_activation", "silu", ("silu", "relu", "elu", "identity")
    )
    by_sum = settings.only("qk_norm", "l2", ("l2", "sum")) == "sum"
    settings.only("use_rope", False, (False, None))
    return DeltaAttention(
        **sizes,
        max_beta=2.0 if settings.get("allow_neg_eigval", False) else 1.0,
        use_beta=bool(settings.get("use_beta", True)),
        convolution=_short_convolution(settings, True),
        activation="silu",
        qk_activation={"identity": "linear", "elu": elu_plus_one}.get(
            activation, activation
        ),
        feature_map="sum" if by_sum else unit_features(sizes["key_dim"]),
        output_norm=OutputNorm("rms", epsilon=_epsilon(settings)),
        output_gate="silu" if settings.get("use_gate", False) else None,
    )


def _delta_weights(attention, prefix, config):
    return [
        *gate_weights(attention, prefix, "o_norm"),
        *rate_weights(attention, prefix, ()),
    ]


def _gate_options(settings):
    gate = settings.activation("hidden_act", "swish", SWISH)
    return dict(
        output_gate=gate if settings.get("use_output_gate", True) else None,
        output_norm=_norm(settings),
    )


def _gated_linear(settings, width):
    sizes = _sizes(settings, width, heads=4, expand_k=0.5, expand_v=1.0)
    size = _short_convolution(settings, False)
    activation = settings.activation(
        "feature_map", None, (None, "relu", "sigmoid", *SWISH)
    )
    return GatedLinearAttention(
        **sizes,
        num_key_value_heads=_key_value_heads(settings, sizes["num_heads"]),
        convolution=size,
        activation=None if size is None else "silu",
        feature_map=_map_of(activation),
        least_log_decay=settings.get("clamp_min", None),
        **_gate_options(settings),
    )


def _map_of(activation):
    """The feature map that applies an activation to each entry."""
    return "identity" if activation is None else keras.activations.get(activation)


def _fused_norm(config, gated):
    """Name of the norm of the heads, which a kernel may fuse with the gate."""
    fused = gated and config.get("fuse_norm", True)
    return "g_norm_swish_gate" if fused else "g_norm"


def _gated_linear_weights(attention, prefix, config):
    norm = _fused_norm(config, attention.output_gate is not None)
    layers = attention._decay_layers
    return [
        *gate_weights(attention, prefix, norm),
        matrix(f"{prefix}gk_proj.0.weight", layers[0]),
        matrix(f"{prefix}gk_proj.1.weight", layers[1]),
        plain(f"{prefix}gk_proj.1.bias", attention._decay_bias),
    ]


def _retention(settings, width):
    sizes = _sizes(settings, width, heads=8, expand_k=1.0, expand_v=2.0)
    activation = settings.activation(
        "feature_map", None, (None, "relu", "sigmoid", *SWISH)
    )
    # The published blocks do not pass them on.
    _short_convolution(settings, False)
    return RetentionAttention(
        **sizes,
        num_key_value_heads=_key_value_heads(settings, sizes["num_heads"]),
        qk_activation=activation,
        **_gate_options(settings),
    )


def _retention_weights(attention, prefix, config):
    norm = _fused_norm(config, attention.output_gate is not None)
    return gate_weights(attention, prefix, norm)


# Kinds of learned maps: their name here, and the names of their tensors.
PROJECTED_MAPS = {
    "elementwise_product": (
        "product",
        ("layer1.weight", "layer2.weight", "layer1.bias", "layer2.bias"),
    ),
    "hedgehog": ("hedgehog", ("layer.weight", "layer.bias")),
    "t2r": ("relu", ("layer.weight",)),
    "dpfp": ("dpfp", ()),
}
ELEMENTARY_MAPS = {
    "elu": "elu",
    "relu": keras.activations.relu,
    "identity": "identity",
}


def _linear(settings, width):
    sizes = _sizes(settings, width, heads=4, expand_k=1.0, expand_v=1.0)
    name = settings.only(
        "feature_map", "elementwise_product", (*PROJECTED_MAPS, *ELEMENTARY_MAPS)
    )
    if name in PROJECTED_MAPS:
        # transformers cannot save shared maps.
        settings.only("tie_feature_map_qk", False, (False,))
        feature_map = feature_maps.get(
            "projected",
            kind=PROJECTED_MAPS[name][0],
            normalize_query=bool(settings.get("norm_q", False)),
            normalize_key=bool(settings.get("norm_k", False)),
        )
    else:
        settings.get("tie_feature_map_qk", False)
        for norm in ("norm_q", "norm_k"):
            settings.only(norm, False, (False, None))
        feature_map = ELEMENTARY_MAPS[name]
    return RetentionAttention(
        **sizes,
        # No decay.
        decays=[1.0] * sizes["num_heads"],
        rotary_wavelength=None,
        num_key_value_heads=_key_value_heads(settings, sizes["num_heads"]),
        feature_map=feature_map,
        normalize=bool(settings.get("norm_feature_map", False)),
        output_gate=None,
        output_norm=_norm(settings),
    )


def _linear_weights(attention, prefix, config):
    weights = gate_weights(attention, prefix, "norm")
    name = config.get("feature_map", "elementwise_product")
    tensors = PROJECTED_MAPS.get(name, (None, ()))[1]
    for index, variable in enumerate(attention._map_variables):
        side, tensor = "qk"[index // len(tensors)], tensors[index % len(tensors)]
        form = plain if len(variable.shape) == 1 else matrix
        weights.append(form(f"{prefix}feature_map_{side}.{tensor}", variable))
    return weights


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
def elu_plus_one(x):
    """`elu(x) + 1`, an activation of queries and keys."""
    return keras.ops.elu(x) + 1.0


FAMILIES = {
    "retnet": Family(_retention, _retention_weights, hidden_ratio=2),
    "gla": Family(_gated_linear, _gated_linear_weights),
    "delta_net": Family(_delta, _delta_weights),
    "gated_deltanet": Family(_gated_delta, _gated_delta_weights, num_layers=21),
    "kda": Family(_kimi_delta, _kimi_delta_weights),
    "linear_attn": Family(_linear, _linear_weights),
}
