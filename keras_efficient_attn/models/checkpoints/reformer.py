"""Reformer: hashed and local attention in reversible blocks.

The published code cuts sorted positions into chunks that depend on later positions;
here buckets start chunks, which is exactly causal. Outputs are the same for texts of at
most `lsh_attn_chunk_length`, whose positions see all before them. Longer texts differ,
as they do between two seeds of the published code's hashes.
"""

import math

from keras_efficient_attn.layers import LocalAttention, ReformerLSHAttention
from keras_efficient_attn.models.checkpoints.settings import Settings
from keras_efficient_attn.models.checkpoints.weights import matrix, plain

# Of training, of the initial weights, and of how much is computed at once; names in
# older files, which the published code does not read.
WITHOUT_EFFECT = """
    attention_probs_dropout_prob axial_norm_std chunk_size_lm_head
    classifier_dropout hash_seed hidden_dropout_prob
    local_attention_probs_dropout_prob lsh_attention_probs_dropout_prob
    num_chunks_after num_chunks_before num_hidden_layers output_past seed
    sinusoidal_pos_embds
""".split()
# Added to the mean square of the keys.
KEY_EPSILON = 1e-6
EMBEDDINGS = "reformer.embeddings."


class Reformer:
    """The family `reformer`."""

    def arguments(self, config):
        """The arguments of `EfficientTransformerBackbone` for a configuration."""
        settings = Settings(config, WITHOUT_EFFECT)
        settings.only("is_decoder", False, (True,))
        settings.only("tie_word_embeddings", False, (False,))
        width = settings.size("hidden_size", 256)
        heads = settings.size("num_attention_heads", 12)
        length = settings.size("max_position_embeddings", 4096)
        kinds = settings.get("attn_layers", ["local", "lsh"] * 3)
        sizes = dict(
            num_heads=heads,
            key_dim=settings.get("attention_head_size", 64),
            use_bias=False,
        )
        if not kinds or not {"lsh", "local"} >= set(kinds):
            raise ValueError(
                "`attn_layers` of config.json must be a list of 'lsh' and 'local'. "
                f"Received: attn_layers={kinds}"
            )
        layers = dict(
            lsh="lsh" in kinds and _hashed(settings, sizes, length),
            local="local" in kinds and _local(settings, sizes),
        )
        # Those of a kind that no layer has.
        for kind in {"lsh", "local"} - set(kinds):
            names = ("attn_chunk_length", "num_chunks_before", "num_chunks_after")
            for name in names:
                settings.get(f"{kind}_{name}", None)
        for name in ("num_buckets", "num_hashes"):
            settings.get(name, None)
        arguments = dict(
            vocabulary_size=settings.get("vocab_size", 320),
            num_layers=len(kinds),
            num_heads=heads,
            head_dim=sizes["key_dim"],
            hidden_dim=width,
            intermediate_dim=settings.get("feed_forward_size", 512),
            attention=[layers[kind] for kind in kinds],
            residual=dict(
                kind="reversible",
                norm_epsilon=settings.get("layer_norm_eps", 1e-12),
                streams="concatenated",
            ),
            feed_forward=settings.activation("hidden_act", "relu"),
            positions=_positions(settings, length),
            embedding=dict(output="untied", output_bias=True),
        )
        settings.finish()
        return arguments

    def backbone_weights(self, backbone, config):
        """The list of `Weight` of a backbone."""
        embedding, norm = backbone.token_embedding, backbone.decoder.final_norm
        table = embedding.embeddings
        weights = [
            plain(f"{EMBEDDINGS}word_embeddings.weight", table, table.shape),
            *_norm_weights("reformer.encoder.layer_norm", norm),
            matrix("lm_head.decoder.weight", embedding.projection),
            plain(["lm_head.decoder.bias", "lm_head.bias"], embedding.projection.bias),
        ]
        positions, name = (
            backbone.embedding.positions,
            f"{EMBEDDINGS}position_embeddings",
        )
        if config.get("axial_pos_embds", True):
            for axis, table in enumerate(positions.tables):
                shape = [1] * len(positions.tables) + [table.shape[1]]
                shape[axis] = table.shape[0]
                weights.append(plain(f"{name}.weights.{axis}", table, shape))
        else:
            table = positions.table.position_embeddings
            weights.append(plain(f"{name}.embedding.weight", table, table.shape))
        for i, block in enumerate(backbone.decoder.blocks):
            prefix = f"reformer.encoder.layers.{i}."
            weights += _block_weights(block, prefix)
        return weights

    def files(self, files, weights):
        """The tensors, as `backbone_weights` names them."""
        return files

    def ignored(self, config):
        """Names of tensors that the model does not read."""
        # The published code adds `lm_head.decoder.bias`.
        return {"lm_head.bias"}


def _block_weights(block, prefix):
    own, attention = f"{prefix}attention.self_attention.", block.attention
    projections = dict(query=attention.query_dense, key=attention.key_dense)
    if isinstance(attention, ReformerLSHAttention):
        projections = dict(query_key=attention.query_dense)
    projections["value"] = attention.value_dense
    weights = [matrix(f"{own}{n}.weight", x) for n, x in projections.items()]
    output = f"{prefix}attention.output.dense.weight"
    weights.append(matrix(output, attention.output_dense, 2))
    feed_forward = f"{prefix}feed_forward."
    dense = dict(
        dense=block.feed_forward.hidden, output=block.feed_forward.output_dense
    )
    for name, layer in dense.items():
        weights.append(matrix(f"{feed_forward}{name}.dense.weight", layer))
        weights.append(plain(f"{feed_forward}{name}.dense.bias", layer.bias))
    residuals = dict(
        attention=block.attention_residual, feed_forward=block.feed_forward_residual
    )
    for name, residual in residuals.items():
        weights += _norm_weights(f"{prefix}{name}.layer_norm", residual.norm)
    return weights


def _norm_weights(name, norm):
    return [plain(f"{name}.weight", norm.gamma), plain(f"{name}.bias", norm.beta)]


def _positions(settings, length):
    axial = settings.get("axial_pos_embds", True)
    shape = settings.get("axial_pos_shape", [64, 64])
    widths = settings.get("axial_pos_embds_dim", [64, 192])
    if not axial:
        return dict(kind="learned", max_length=length)
    return dict(kind="axial", shape=tuple(shape), widths=tuple(widths))


def _hashed(settings, sizes, length):
    chunk = settings.size("lsh_attn_chunk_length", 64)
    settings.only("lsh_num_chunks_before", 1, (1,))
    settings.only("lsh_num_chunks_after", 0, (0,))
    buckets = settings.get("num_buckets", None)
    if buckets is None:
        # The published code's choice for texts of the full length.
        power = int(math.log2(max(2, 2 * (length // chunk))))
        buckets = 2**power
        limit = 2 * max(int((length // chunk) ** 0.5), chunk)
        if buckets > limit:
            buckets = (2 ** (power // 2), 2 ** (power - power // 2))
    return ReformerLSHAttention(
        **sizes,
        bucket_size=chunk,
        num_hashes=settings.get("num_hashes", 1),
        num_buckets=tuple(buckets) if isinstance(buckets, list) else buckets,
        scale_logits=False,
        dense_prefix=chunk,
        key_epsilon=KEY_EPSILON,
    )


def _local(settings, sizes):
    chunk = settings.get("local_attn_chunk_length", 64)
    before = settings.get("local_num_chunks_before", 1)
    settings.only("local_num_chunks_after", 0, (0,))
    return LocalAttention(**sizes, query_block=chunk, memory=before * chunk)
