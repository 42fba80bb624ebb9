"""The backbone in which every attention layer of this package can stand."""

import random

import keras
import keras_hub

from keras_efficient_attn.layers import ChunkedFeedForward
from keras_efficient_attn.models.blocks.attention import (
    attention_spec,
    make_attention,
)
from keras_efficient_attn.models.blocks.convolution import CausalConvolution
from keras_efficient_attn.models.blocks.feed_forward import (
    FeedForward,
    get_activation,
    serialize_activation,
)
from keras_efficient_attn.models.blocks.input_embedding import InputEmbedding
from keras_efficient_attn.models.blocks.positions import get_positions
from keras_efficient_attn.models.blocks.separable_convolution import (
    SeparableConvolution,
)
from keras_efficient_attn.models.blocks.transformer_block import TransformerBlock
from keras_efficient_attn.models.blocks.transformer_stack import TransformerStack
from keras_efficient_attn.models.presets import PresetMixin
from keras_efficient_attn.models.universal.transformer import UniversalTransformer

ARCHITECTURES = ("decoder", "encoder", "encoder_decoder")
TRANSITIONS = ("feed_forward", "separable_convolution")


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class EfficientTransformerBackbone(PresetMixin, keras_hub.models.Backbone):
    """A Transformer with any attention: KerasHub's backbone for this package's layers.

    ```
    x = embeddings(tokens) [+ n-grams] [+ recall] [+ positions]
    num_recurrences times, for each block:
        x = x + attention([convolution](norm(x)))
        x = x + feed_forward(norm(x))
    ```

    Args:
        vocabulary_size: Number of tokens.
        num_layers: Number of blocks; with `"encoder_decoder"`, of each of the two.
        num_heads: Attention heads of a block.
        hidden_dim: Width of the model.
        intermediate_dim: Width of the feed-forward networks.
        attention: The self-attention: a name with options, such as `"performer"` or
            `"softmax:dropout=0.1"` (see `keras_efficient_attn.layers.get_attention`),
            the configuration of a layer as `keras.saving.serialize_keras_object`
            gives it, or a layer. One for all blocks, or a list that the blocks cycle
            through. A layer is a template: each block gets its own, with that
            configuration and the backbone's `dtype`. Defaults to `"performer"`.
        head_dim: Width of a head. Defaults to `hidden_dim / num_heads`.
        architecture: `"decoder"` (causal, the default), `"encoder"`, or
            `"encoder_decoder"`.
        cross_attention: The attention of a decoder to its encoder, as `attention`,
            one for all blocks. Defaults to `"softmax"`.
        residual: `"pre_norm"` (the default), `"post_norm"`, `"gated"` (of GTrXL, a
            `keras_efficient_attn.GatedResidual` in the place of each sum; other gates
            are `"gated_input"`, `"gated_output"`, `"gated_highway"` and
            `"gated_sigmoid_tanh"`), or `"reversible"`: two streams, whose activations
            are rebuilt in the backward pass, for memory that does not grow with the
            number of layers (`keras_efficient_attn.ReversibleStack`).
        norm: `"layer_norm"` (the default) or `"rms_norm"`.
        norm_epsilon: Of the norms. Defaults to 1e-5.
        activation: Of the feed-forward networks: name of a Keras activation,
            `"squared_relu"`, or a callable. Defaults to `"gelu"`.
        gated_feed_forward: Whether they are gated linear units. Defaults to `False`.
        feed_forward_chunk: Positions that a feed-forward network works on at once,
            recomputed for the gradient (`keras_efficient_attn.ChunkedFeedForward`).
            Defaults to `None`: all.
        transition: What follows attention in a block: `"feed_forward"` (the default) or
            `"separable_convolution"` (`SeparableConvolution`), of the same width.
        use_bias: Whether dense layers, projections and layer norms have biases.
            Defaults to `True`.
        positions: `"sinusoidal"`, `"learned"`, `"rotary"` (inside the attention
            layers), or `None`, the default: none but what the layers have of their
            own.
        max_sequence_length: Number of `"learned"` positions.
        positions_each_layer: Whether every block adds positions to its input, a
            table of its own for `"learned"`, instead of once to the embeddings. A
            Universal Transformer has one table, and adds it in each recurrence.
            Defaults to `False`.
        max_position_offset: In training, positions count from a random number up to
            this, so that a model knows those of longer sequences. With
            `"encoder_decoder"`, where the two count from the same number, it needs
            `positions_each_layer`. Defaults to 0.
        num_recurrences: How often all the blocks are applied, one after the other,
            with the same weights. Defaults to 1.
        step_signals: `"learned"` or `"sinusoidal"` signals that tell the recurrences
            apart, which makes a `UniversalTransformer` of encoder and decoder. Defaults
            to `None`.
        adaptive_computation: Dict of options, such as `{"ponder_cost": 0.01}`, or `{}`:
            each position has as many recurrences as it asks for, `num_recurrences` at
            most (`UniversalTransformer`). Defaults to `None`.
        convolution: Positions that a depthwise causal convolution before each
            self-attention reaches, such as 4. Defaults to `None`: no convolution.
        ngram_orders: Lengths of the hashed n-grams whose embeddings are added to
            those of the tokens, such as `(2, 3, 4, 5, 6)`. Defaults to `()`: none.
        ngram_rows: Rows of the table of each order. Defaults to 16,384.
        ngram_width: Width of these rows. Defaults to 32.
        recall_orders: Lengths of the n-grams that are looked up in the text so far,
            for embeddings of what followed them (`NGramRecall`), such as
            `(2, 3, 4, 5, 6, 8)`. Defaults to `()`: none. For causal text.
        tie_embeddings: Whether the output projection of language models is the
            embedding. Defaults to `True`.
        scale_embeddings: Whether token embeddings are multiplied by `√hidden_dim`.
            Defaults to `False`.
        dropout: Rate of dropout on embeddings and sublayers' outputs. Defaults to 0.
        dtype: Policy of all layers.
        **kwargs: Those of `keras.Model`, such as `name`.

    Call arguments:
        inputs: Dict of integers `token_ids` and `padding_mask` (1, and 0 at padding,
            which stands on the right), `(batch, length)`; both may be `None` in
            shape. With `"encoder_decoder"`: `encoder_token_ids`,
            `encoder_padding_mask`, `decoder_token_ids`, `decoder_padding_mask`.

    Returns:
        `(batch, length, hidden_dim)`. With `"encoder_decoder"`, a dict of
        `encoder_sequence_output` and `decoder_sequence_output`.

    Raises:
        ValueError: For an argument named above that cannot be honoured.
        TypeError: If `attention` is not one of the kinds above.

    Example:

    ```python
    from keras_efficient_attn.models import EfficientTransformerBackbone

    backbone = EfficientTransformerBackbone(
        vocabulary_size=256,
        num_layers=4,
        num_heads=4,
        hidden_dim=64,
        intermediate_dim=256,
        attention=["performer:feature_map=elu", "softmax"],
        positions="rotary",
    )
    tokens = keras.random.randint((2, 100), 0, 256)
    hidden = backbone({"token_ids": tokens, "padding_mask": keras.ops.ones((2, 100))})
    ```

    A configuration that ships with the package, with random weights:

    ```python
    backbone = EfficientTransformerBackbone.from_preset(
        "performer_enwik8_12l", load_weights=False
    )
    ```

    Reference:
        - [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762)
        - [Al-Rfou et al., 2019](https://arxiv.org/abs/1808.04444), for positions in
          each layer
        - [Dehghani et al., 2019](https://arxiv.org/abs/1807.03819), for recurrences
    """

    def __init__(
        self,
        vocabulary_size,
        num_layers,
        num_heads,
        hidden_dim,
        intermediate_dim,
        attention="performer",
        head_dim=None,
        architecture="decoder",
        cross_attention="softmax",
        residual="pre_norm",
        norm="layer_norm",
        norm_epsilon=1e-5,
        activation="gelu",
        gated_feed_forward=False,
        feed_forward_chunk=None,
        transition="feed_forward",
        use_bias=True,
        positions=None,
        max_sequence_length=None,
        positions_each_layer=False,
        max_position_offset=0,
        num_recurrences=1,
        step_signals=None,
        adaptive_computation=None,
        convolution=None,
        ngram_orders=(),
        ngram_rows=2**14,
        ngram_width=32,
        recall_orders=(),
        tie_embeddings=True,
        scale_embeddings=False,
        dropout=0.0,
        dtype=None,
        **kwargs,
    ):
        if isinstance(attention, list | tuple):
            attention = [attention_spec(item) for item in attention]
        else:
            attention = attention_spec(attention)
        config = {
            "vocabulary_size": vocabulary_size,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "hidden_dim": hidden_dim,
            "intermediate_dim": intermediate_dim,
            "attention": attention,
            "head_dim": head_dim,
            "architecture": architecture,
            "cross_attention": attention_spec(cross_attention),
            "residual": residual,
            "norm": norm,
            "norm_epsilon": norm_epsilon,
            "activation": serialize_activation(get_activation(activation)),
            "gated_feed_forward": gated_feed_forward,
            "feed_forward_chunk": feed_forward_chunk,
            "transition": transition,
            "use_bias": use_bias,
            "positions": positions,
            "max_sequence_length": max_sequence_length,
            "positions_each_layer": positions_each_layer,
            "max_position_offset": max_position_offset,
            "num_recurrences": num_recurrences,
            "step_signals": step_signals,
            "adaptive_computation": adaptive_computation,
            "convolution": convolution,
            "ngram_orders": list(ngram_orders),
            "ngram_rows": ngram_rows,
            "ngram_width": ngram_width,
            "recall_orders": list(recall_orders),
            "tie_embeddings": tie_embeddings,
            "scale_embeddings": scale_embeddings,
            "dropout": dropout,
        }
        _check(config)

        # === Layers ===
        layers = _Layers(config, dtype)
        embedding = layers.embedding()
        encoder = decoder = None
        if architecture != "decoder":
            encoder = layers.stack("encoder", causal=False)
        if architecture != "encoder":
            decoder = layers.stack(
                "decoder", causal=True, cross=architecture == "encoder_decoder"
            )

        # === Functional model ===
        def sequence_inputs(prefix=""):
            return {
                name: keras.Input((None,), dtype="int32", name=name)
                for name in (f"{prefix}token_ids", f"{prefix}padding_mask")
            }

        if architecture == "encoder_decoder":
            inputs = sequence_inputs("encoder_") | sequence_inputs("decoder_")
            encoder_mask = inputs["encoder_padding_mask"]
            memory = encoder(
                embedding(inputs["encoder_token_ids"]), padding_mask=encoder_mask
            )
            outputs = {
                "encoder_sequence_output": memory,
                "decoder_sequence_output": decoder(
                    embedding(inputs["decoder_token_ids"]),
                    padding_mask=inputs["decoder_padding_mask"],
                    memory=memory,
                    memory_padding_mask=encoder_mask,
                ),
            }
        else:
            inputs = sequence_inputs()
            outputs = (encoder or decoder)(
                embedding(inputs["token_ids"]), padding_mask=inputs["padding_mask"]
            )
        super().__init__(inputs=inputs, outputs=outputs, dtype=dtype, **kwargs)

        # === Config ===
        self.embedding = embedding
        self.encoder = encoder
        self.decoder = decoder
        self.token_embedding = embedding.token_embedding
        self.transformer_layers = [
            block
            for stack in (encoder, decoder)
            if stack is not None
            for block in stack.blocks
        ]
        self.config = config
        for name in ("vocabulary_size", "num_layers", "num_heads", "hidden_dim"):
            setattr(self, name, config[name])
        self.architecture = architecture
        self.max_sequence_length = max_sequence_length

    def get_initial_state(self, batch_size, max_length=None, memory_length=None):
        """The state before the first token, for `stream`.

        Args:
            batch_size: Rows in the batch.
            max_length: The longest context, for layers whose state grows with it;
                `None` for any context, which those layers refuse.
            memory_length: Of `RelativePositionXL` layers. Defaults to what gives the
                outputs of one call on the whole context; without `max_length`, to
                the layers' own.

        Returns:
            A nest of dicts of tensors, batch first.

        Raises:
            ValueError: If the architecture is `"encoder"`, a layer does not stream, or
                there are fewer learned positions than `max_length`.
        """
        if self.architecture == "encoder":
            raise ValueError(
                "Only a backbone with a decoder streams. Received: "
                f"architecture={self.architecture!r}"
            )
        limit = self.max_sequence_length
        if limit is not None and (max_length is None or max_length > limit):
            raise ValueError(
                f"The backbone has {limit} learned positions. Received: "
                f"max_length={max_length}"
            )
        return {
            "embedding": self.embedding.get_initial_state(batch_size),
            "decoder": self.decoder.get_initial_state(
                batch_size, max_length, memory_length
            ),
        }

    def encode(self, token_ids, padding_mask):
        """The output of the encoder of an `"encoder_decoder"`, for `stream`.

        Args:
            token_ids: Integers `(batch, length)`.
            padding_mask: `(batch, length)`, 0 at padding.
        """
        if self.architecture != "encoder_decoder":
            raise ValueError(
                "`encode` is for a backbone with architecture='encoder_decoder'. "
                f"Received: architecture={self.architecture!r}"
            )
        return self.encoder(self.embedding(token_ids), padding_mask=padding_mask)

    def stream(self, token_ids, state, memory=None, memory_padding_mask=None):
        """Reads a segment of a sequence, down to a single token.

        The segments of a sequence, read one after the other, have the outputs of one
        call on the whole of it.

        Args:
            token_ids: Integers `(batch, length)`, without padding.
            state: From `get_initial_state` or the previous segment's call.
            memory: What a decoder with an encoder attends to, from `encode`.
            memory_padding_mask: Optional `(batch, memory_length)`, 0 at padding.

        Returns:
            `(hidden, state)`: `(batch, length, hidden_dim)`, and the new state.

        Raises:
            ValueError: If there is an encoder and no `memory`, or the other way round.
        """
        if (memory is not None) != (self.architecture == "encoder_decoder"):
            raise ValueError(
                "`memory` is for architecture='encoder_decoder', and only for it. "
                f"Received: architecture={self.architecture!r}, memory given: "
                f"{memory is not None}"
            )
        x, embedding_state = self.embedding(token_ids, state=state["embedding"])
        x, decoder_state = self.decoder(
            x,
            memory=memory,
            memory_padding_mask=memory_padding_mask,
            state=state["decoder"],
        )
        return x, {"embedding": embedding_state, "decoder": decoder_state}

    def get_config(self):
        return {**super().get_config(), **self.config}


class _Layers:
    """Makes the layers of a backbone from its configuration."""

    def __init__(self, config, dtype):
        self.config = config
        self.dtype = dtype
        self.shared_biases = None
        # Of all layers that add positions: they are to draw the same offsets.
        self.offset_seed = random.randrange(2**31)

    def embedding(self):
        config = self.config
        once = config["positions"] != "rotary" and not config["positions_each_layer"]
        return InputEmbedding(
            config["vocabulary_size"],
            config["hidden_dim"],
            positions=config["positions"] if once else None,
            max_length=config["max_sequence_length"] if once else None,
            max_position_offset=config["max_position_offset"] if once else 0,
            ngram_orders=config["ngram_orders"],
            ngram_rows=config["ngram_rows"],
            ngram_width=config["ngram_width"],
            recall_orders=config["recall_orders"],
            tie_weights=config["tie_embeddings"],
            scale=config["scale_embeddings"],
            dropout=config["dropout"],
            dtype=self.dtype,
            name="embedding",
        )

    def stack(self, name, causal, cross=False):
        blocks = [
            self.block(i, causal, cross) for i in range(self.config["num_layers"])
        ]
        options = dict(dtype=self.dtype, name=name)
        if not _is_universal(self.config):
            return TransformerStack(blocks, self.config["num_recurrences"], **options)
        return UniversalTransformer(
            blocks,
            self.config["num_recurrences"],
            positions=self.repeated_positions(),
            step_signals=self.config["step_signals"],
            adaptive_computation=self.config["adaptive_computation"],
            **options,
        )

    def block(self, i, causal, cross):
        config = self.config
        specs = config["attention"]
        spec = specs[i % len(specs)] if isinstance(specs, list) else specs
        rotary = config["positions"] == "rotary"
        return TransformerBlock(
            attention=self.attention(spec, rotary, "attention"),
            feed_forward=self.transition(causal),
            causal=causal,
            cross_attention=self.attention(
                config["cross_attention"], False, "cross_attention"
            )
            if cross
            else None,
            convolution=self.convolution(),
            positions=None if _is_universal(config) else self.repeated_positions(),
            residual=config["residual"],
            norm=config["norm"],
            norm_epsilon=config["norm_epsilon"],
            use_bias=config["use_bias"],
            dropout=config["dropout"],
            dtype=self.dtype,
            name=f"block_{i}",
        )

    def transition(self, causal):
        config = self.config
        if config["transition"] == "separable_convolution":
            return SeparableConvolution(
                config["intermediate_dim"],
                activation=config["activation"],
                causal=causal,
                use_bias=config["use_bias"],
                dtype=self.dtype,
                name="separable_convolution",
            )
        layer = FeedForward(
            config["intermediate_dim"],
            activation=config["activation"],
            gated=config["gated_feed_forward"],
            use_bias=config["use_bias"],
            dtype=self.dtype,
            name="feed_forward",
        )
        if config["feed_forward_chunk"] is None:
            return layer
        return ChunkedFeedForward(
            layer,
            config["feed_forward_chunk"],
            dtype=self.dtype,
            name="chunked_feed_forward",
        )

    def attention(self, spec, rotary, name):
        config = self.config
        layer = make_attention(
            spec,
            num_heads=config["num_heads"],
            key_dim=config["head_dim"] or config["hidden_dim"] // config["num_heads"],
            use_bias=config["use_bias"],
            rotary=rotary,
            biases=self.shared_biases,
            name=name,
            dtype=self.dtype,
        )
        if layer.shares_with_blocks and layer.remembers_inputs:
            self.shared_biases = layer.biases
        return layer

    def convolution(self):
        if self.config["convolution"] is None:
            return None
        return CausalConvolution(
            self.config["convolution"], dtype=self.dtype, name="convolution"
        )

    def repeated_positions(self):
        """The layer that adds positions again and again, or `None`."""
        if not self.config["positions_each_layer"]:
            return None
        return get_positions(
            self.config["positions"],
            self.config["max_sequence_length"],
            self.config["max_position_offset"],
            self.offset_seed,
            dtype=self.dtype,
            name="positions",
        )


def _is_universal(config):
    """Whether encoder and decoder are a `UniversalTransformer`."""
    options = (config["step_signals"], config["adaptive_computation"])
    return any(option is not None for option in options)


def _check(config):
    """Raises `ValueError` for what the layers would not notice."""
    sizes = ("vocabulary_size", "num_layers", "num_heads", "hidden_dim")
    for name in (*sizes, "head_dim"):
        received = config[name]
        if name == "head_dim" and received is None:
            continue
        if not isinstance(received, int) or received < 1:
            raise ValueError(
                f"`{name}` must be a positive integer. Received: {name}={received!r}"
            )
    if config["head_dim"] is None and config["hidden_dim"] % config["num_heads"]:
        raise ValueError(
            "`hidden_dim` must be a multiple of `num_heads`, or `head_dim` given. "
            f"Received: hidden_dim={config['hidden_dim']}, "
            f"num_heads={config['num_heads']}"
        )
    if config["attention"] == []:
        raise ValueError("`attention` must name a layer. Received: attention=[]")
    if config["architecture"] not in ARCHITECTURES:
        raise ValueError(
            f"`architecture` must be one of {', '.join(ARCHITECTURES)}. Received: "
            f"architecture={config['architecture']!r}"
        )
    added = ("sinusoidal", "learned")
    if config["positions_each_layer"] and config["positions"] not in added:
        raise ValueError(
            f"`positions_each_layer` is for the positions {' and '.join(added)}. "
            f"Received: positions={config['positions']!r}"
        )
    if (
        config["max_position_offset"]
        and config["architecture"] == "encoder_decoder"
        and not config["positions_each_layer"]
    ):
        raise ValueError(
            "`max_position_offset` with architecture='encoder_decoder' needs "
            "positions_each_layer=True: both share one embedding, whose two calls "
            "would draw two offsets. Received: max_position_offset="
            f"{config['max_position_offset']!r}"
        )
    if config["transition"] not in TRANSITIONS:
        raise ValueError(
            f"`transition` must be one of {', '.join(TRANSITIONS)}. Received: "
            f"transition={config['transition']!r}"
        )
    for name in ("gated_feed_forward", "feed_forward_chunk"):
        if config["transition"] != "feed_forward" and config[name]:
            raise ValueError(
                f"`{name}` is for transition='feed_forward'. Received: "
                f"transition={config['transition']!r}, {name}={config[name]!r}"
            )
    # Before the layers, so that errors name the backbone's arguments.
    get_positions(
        config["positions"],
        config["max_sequence_length"],
        config["max_position_offset"],
    )
