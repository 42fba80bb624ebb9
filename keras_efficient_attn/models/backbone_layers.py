"""The layers of a backbone, made from its arguments."""

import random

from keras_efficient_attn.layers.feed_forward import ChunkedFeedForward
from keras_efficient_attn.models.blocks.attention import make_attention
from keras_efficient_attn.models.blocks.convolution import (
    CausalConvolution,
    SeparableConvolution,
)
from keras_efficient_attn.models.blocks.feed_forward import FeedForward
from keras_efficient_attn.models.blocks.input_embedding import InputEmbedding
from keras_efficient_attn.models.blocks.transformer_block import TransformerBlock
from keras_efficient_attn.models.blocks.transformer_stack import TransformerStack
from keras_efficient_attn.models.universal_transformer import UniversalTransformer


class BackboneLayers:
    """Makes the layers of a backbone from its arguments."""

    def __init__(self, options, dtype):
        self.options = options
        self.dtype = dtype
        # One seed for all layers that add positions, so that they draw the same
        # offsets.
        self.offset_seed = random.randrange(2**31)

    def embedding(self):
        options = self.options
        return InputEmbedding(
            options.vocabulary_size,
            options.hidden_dim,
            embedding=options.embedding,
            positions=options.positions,
            dropout=options.dropout,
            output_width=options.hidden_dim * options.residual.width_factor,
            dtype=self.dtype,
            name="embedding",
        )

    def stack(self, name, causal, cross=False):
        recurrence = self.options.recurrence
        residual = self.options.residual
        end = dict(
            final_norm=residual.final_norm, output_dropout=residual.output_dropout
        )
        if residual.streams != "mean":
            end["streams"] = residual.streams
        blocks = [self.block(i, causal, cross) for i in range(self.options.num_layers)]
        if not recurrence.universal:
            return TransformerStack(
                blocks,
                recurrence.num_recurrences,
                **end,
                dtype=self.dtype,
                name=name,
            )
        return UniversalTransformer(
            blocks,
            **recurrence.get_config(),
            **end,
            positions=self.repeated_positions(),
            dtype=self.dtype,
            name=name,
        )

    def block(self, i, causal, cross):
        options = self.options
        specs = options.attention
        if not causal and options.encoder_attention is not None:
            specs = options.encoder_attention
        spec = specs[i % len(specs)] if isinstance(specs, list) else specs
        rotary = options.positions.kind == "rotary"
        attention = self.attention(spec, rotary, "attention")
        cross_attention = positions = None
        if cross:
            cross_attention = self.attention(
                options.cross_attention, False, "cross_attention"
            )
        if not options.recurrence.universal:
            positions = self.repeated_positions()
        return TransformerBlock(
            attention=attention,
            feed_forward=self.feed_forward(causal),
            causal=causal,
            cross_attention=cross_attention,
            convolution=self.convolution(),
            positions=positions,
            residual=options.residual.kinds[i % len(options.residual.kinds)],
            norm=options.residual.norm,
            norm_epsilon=options.residual.norm_epsilon,
            use_bias=options.use_bias,
            dropout=options.dropout,
            layer_dropout=options.residual.layer_dropout,
            dtype=self.dtype,
            name=f"block_{i}",
        )

    def feed_forward(self, causal):
        width, feed_forward = self.options.intermediate_dim, self.options.feed_forward
        if width is None:
            return None
        common = dict(
            activation=feed_forward.activation,
            use_bias=self.options.use_bias,
            dtype=self.dtype,
        )
        if feed_forward.separable_convolution:
            return SeparableConvolution(
                width, causal=causal, name="separable_convolution", **common
            )
        layer = FeedForward(
            width,
            gated=feed_forward.gated,
            dropout=feed_forward.dropout,
            name="feed_forward",
            **common,
        )
        if feed_forward.chunk_size is None:
            return layer
        return ChunkedFeedForward(
            layer,
            feed_forward.chunk_size,
            dtype=self.dtype,
            name="chunked_feed_forward",
        )

    def attention(self, spec, rotary, name):
        options = self.options
        return make_attention(
            spec,
            num_heads=options.num_heads,
            key_dim=options.head_dim or options.hidden_dim // options.num_heads,
            use_bias=options.use_bias,
            rotary=rotary,
            name=name,
            dtype=self.dtype,
        )

    def convolution(self):
        if self.options.convolution is None:
            return None
        return CausalConvolution(
            self.options.convolution, dtype=self.dtype, name="convolution"
        )

    def repeated_positions(self):
        """The layer that adds positions in every recurrence, or `None`."""
        positions = self.options.positions
        if not positions.each_layer:
            return None
        return positions.make_layer(
            self.offset_seed, dtype=self.dtype, name="positions"
        )
