"""Maps tokens to vectors."""

import dataclasses
import inspect
import math

import keras
from keras import ops

from keras_efficient_attn.layers.arguments import (
    KeepsArguments,
    dense_layer,
    spec_with_state,
)
from keras_efficient_attn.layers.options import Options
from keras_efficient_attn.layers.quantization import KeepsQuantization
from keras_efficient_attn.models.blocks.positions import PositionOptions
from keras_efficient_attn.ops.common.checks import (
    check_name,
    check_rate,
)
from keras_efficient_attn.ops.common.numerics import wide_dtype
from keras_efficient_attn.ops.common.rows import RowOrder

OUTPUTS = ("tied", "untied")


@dataclasses.dataclass(frozen=True)
class EmbeddingOptions(Options):
    """The token embeddings of a backbone.

    Args:
        output: `"tied"` (the default) if the output projection of language models
            shares the embedding, or `"untied"`.
        output_bias: Whether an `"untied"` output projection has a bias. Defaults to
            `False`.
        scale: Whether token embeddings are multiplied by `√hidden_dim`. Defaults to
            `None`: with sinusoidal positions, which are many times as large as
            embeddings at the start of training.
        features: Layers from token ids `(batch, length)` to `(batch, length,
            hidden_dim)`, which are added to the embeddings; layers or their
            configurations. To stream, a layer needs `get_initial_state(batch_size)` and
            returns `(output, state)` from a call with `state`; a layer that
            `supports_masking` is called with a `mask` `(batch, length)`, true and then
            false, and a state of rows of different lengths needs one. A layer is a
            template: each backbone gets a new layer with its configuration and the
            backbone's `dtype`. Defaults to `()`: none.

    Raises:
        ValueError: For an unknown `output`.
        TypeError: If a feature is not a layer.
    """

    output: str = "tied"
    output_bias: bool = False
    scale: bool | None = None
    features: tuple[keras.layers.Layer, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        check_name("embedding", self.output, OUTPUTS)
        if self.output_bias and self.output == "tied":
            raise ValueError(
                "`output_bias=True` needs output='untied'. Received: output='tied', "
                "output_bias=True"
            )
        features = tuple(
            keras.saving.deserialize_keras_object(feature)
            if isinstance(feature, dict)
            else feature
            for feature in self.features
        )
        for feature in features:
            if not isinstance(feature, keras.layers.Layer):
                raise TypeError(
                    "`features` must be layers, or their configurations. Received: "
                    f"features={self.features!r}"
                )
        object.__setattr__(self, "features", features)

    def get_config(self):
        features = [keras.saving.serialize_keras_object(f) for f in self.features]
        return {**super().get_config(), "features": features}


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class ProjectedEmbedding(KeepsQuantization, KeepsArguments, keras.layers.Layer):
    """An embedding whose reverse is a dense layer, of another width or with a bias.

    It holds an `Embedding`, as Keras quantises no subclass of one.

    Args:
        input_dim, output_dim: As of `keras.layers.Embedding`.
        projected_dim: Width of what the reverse reads.
        use_bias: Whether the reverse has a bias.
        **kwargs: Arguments of `keras.layers.Layer`.
    """

    def __init__(self, input_dim, output_dim, projected_dim, use_bias, **kwargs):
        super().__init__(**kwargs)
        self.keep(locals())
        self.embedding = keras.layers.Embedding(
            input_dim, output_dim, dtype=self.dtype_policy, name="embedding"
        )
        # Logits are float32 at least.
        dtype = wide_dtype(self.compute_dtype)
        self.projection = dense_layer(
            input_dim, dtype=dtype, use_bias=use_bias, name="projection"
        )

    def build(self, input_shape=None):
        self.embedding.build(input_shape)
        self.projection.build((None, None, self.projected_dim))
        self.built = True

    @property
    def embeddings(self):
        """The table `(input_dim, output_dim)`."""
        return self.embedding.embeddings

    def call(self, inputs, reverse=False):
        return (self.projection if reverse else self.embedding)(inputs)

    def compute_output_spec(self, inputs, reverse=False):
        width = self.input_dim if reverse else self.output_dim
        shape = inputs.shape[:-1] if reverse else inputs.shape
        layer = self.projection if reverse else self.embedding
        return keras.KerasTensor((*shape, width), layer.compute_dtype)


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class InputEmbedding(KeepsQuantization, keras.layers.Layer):
    """The sum of token embeddings, token features and positions.

    Args:
        vocabulary_size: Number of tokens.
        hidden_dim: Width.
        embedding: `EmbeddingOptions`, or a shorthand for them. With `"tied"`,
            `token_embedding(x, reverse=True)`, which gives float32 logits, shares the
            embedding's weights.
        positions: `PositionOptions`, or a shorthand for them, for positions to add
            here, unless with `each_layer`. Defaults to `None`.
        dropout: Rate of dropout on the sum. Defaults to 0.
        output_width: Width of what `token_embedding(x, reverse=True)` reads, for an
            `"untied"` one. Defaults to `None`: `hidden_dim`.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        token_ids: Integers `(batch, length)`.
        padding_mask: Optional `(batch, length)`, 0 at padding, anywhere in a row:
            features and positions count the other tokens only.
        state: Optional, from `get_initial_state` or the previous segment's call.
        document_ids: Optional integers `(batch, length)`, without a `state` and
            `features`: positions count anew where they change.

    Returns:
        `(batch, length, hidden_dim)`; `(output, state)` with `state`.

    Raises:
        ValueError: On a call with `padding_mask` and `state`, if a feature does not
            support masking; on a call with `document_ids`, if there are features.
    """

    def __init__(
        self,
        vocabulary_size,
        hidden_dim,
        embedding="tied",
        positions=None,
        dropout=0.0,
        output_width=None,
        **kwargs,
    ):
        # autocast=False: a state keeps its dtype.
        super().__init__(autocast=False, **kwargs)
        check_rate("dropout", dropout)
        self.options = EmbeddingOptions.get("embedding", embedding)
        self.position_options = PositionOptions.get("positions", positions)
        self.scale = self.options.scale
        if self.scale is None:
            self.scale = self.position_options.kind == "sinusoidal"
        self.output_width = output_width or hidden_dim
        sizes = vocabulary_size, hidden_dim
        names = dict(dtype=self.dtype_policy, name="token_embedding")
        if self.output_width != hidden_dim or self.options.output_bias:
            if self.options.output == "tied":
                raise ValueError(
                    "Outputs that are wider than the model need embedding='untied'. "
                    f"Received: embedding='tied', output width {self.output_width}, "
                    f"hidden_dim={hidden_dim}"
                )
            self.token_embedding = ProjectedEmbedding(
                *sizes, self.output_width, self.options.output_bias, **names
            )
        else:
            self.token_embedding = keras.layers.ReversibleEmbedding(
                *sizes,
                tie_weights=self.options.output == "tied",
                reverse_dtype="float32",
                **names,
            )
        self.features = [
            type(layer).from_config({**layer.get_config(), "dtype": self.dtype_policy})
            for layer in self.options.features
        ]
        self.positions = None
        if not self.position_options.each_layer:
            self.positions = self.position_options.make_layer(
                dtype=self.dtype_policy, name="positions"
            )
        self.dropout = keras.layers.Dropout(
            dropout, dtype=self.dtype_policy, name="dropout"
        )

    def build(self, input_shape):
        self.token_embedding.build(input_shape)
        for layer in self.features:
            layer.build(input_shape)
        if self.positions is not None:
            self.positions.build((*input_shape, self.token_embedding.output_dim))

    def get_initial_state(self, batch_size):
        """The state before the first token, a dict of tensors, batch first."""
        return {
            name: layer.get_initial_state(batch_size)
            for name, layer in self._streaming_layers()
        }

    def call(
        self,
        token_ids,
        padding_mask=None,
        state=None,
        training=None,
        document_ids=None,
    ):
        if document_ids is not None and self.features:
            raise ValueError(
                "`features` mix the tokens of different documents: leave out "
                f"`features` or `document_ids`. Received: features={self.features}"
            )
        order = None
        if padding_mask is not None and self._streaming_layers():
            order = RowOrder.of(ops.cast(padding_mask, "bool"))
            token_ids = order.to_front(token_ids)
            if document_ids is not None:
                document_ids = order.to_front(document_ids)
        x = self.token_embedding(token_ids)
        if self.scale:
            x = x * math.sqrt(self.token_embedding.output_dim)
        new_state = {}
        for name, layer in self._streaming_layers():
            adds = layer is self.positions
            received = x if adds else token_ids
            options = {}
            if "training" in inspect.signature(layer.call).parameters:
                options["training"] = training
            if order is not None and (adds or layer.supports_masking):
                options["mask"] = order.exists
            if adds and document_ids is not None:
                options["document_ids"] = document_ids
            if state is None:
                output = layer(received, **options)
            else:
                self._check_feature(layer, order, options)
                output, new_state[name] = layer(received, state=state[name], **options)
            x = output if adds else x + output
        x = x if order is None else order.to_places(x)
        x = self.dropout(x, training=training)
        return x if state is None else (x, new_state)

    def _check_feature(self, layer, order, options):
        if order is not None and "mask" not in options:
            raise ValueError(
                "With `state`, rows of different lengths need `features` that support "
                "masking: set `supports_masking`, and take `mask` in `call`. Received: "
                f"padding_mask given, features with {layer!r}"
            )

    def compute_output_spec(
        self,
        token_ids,
        padding_mask=None,
        state=None,
        training=None,
        document_ids=None,
    ):
        shape = (*token_ids.shape, self.token_embedding.output_dim)
        output = keras.KerasTensor(shape, dtype=self.compute_dtype)
        return spec_with_state(output, state)

    def _streaming_layers(self):
        """Names of states and their layers, in call order."""
        layers = {f"feature_{i}": layer for i, layer in enumerate(self.features)}
        if self.positions is not None:
            layers["positions"] = self.positions
        return layers.items()

    def get_config(self):
        return {
            **super().get_config(),
            "vocabulary_size": self.token_embedding.input_dim,
            "hidden_dim": self.token_embedding.output_dim,
            "embedding": self.options.get_config(),
            "positions": self.position_options.get_config(),
            "dropout": self.dropout.rate,
            "output_width": self.output_width,
        }
