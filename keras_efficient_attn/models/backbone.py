"""A backbone that accepts every attention layer of this package."""

from types import SimpleNamespace

import keras
import keras_hub

from keras_efficient_attn.layers.options import Options
from keras_efficient_attn.models.backbone_layers import BackboneLayers
from keras_efficient_attn.models.blocks.attention import (
    attention_spec,
)
from keras_efficient_attn.models.blocks.feed_forward import (
    FeedForwardOptions,
)
from keras_efficient_attn.models.blocks.input_embedding import (
    EmbeddingOptions,
)
from keras_efficient_attn.models.blocks.positions import (
    MAX_WAVELENGTH,
    PositionOptions,
)
from keras_efficient_attn.models.blocks.residual import ResidualOptions
from keras_efficient_attn.models.checkpoints.conversion import (
    export_backbone,
    read_backbone,
)
from keras_efficient_attn.models.files import (
    OptionalDocuments,
    PresetMixin,
    check_lora_file,
)
from keras_efficient_attn.models.universal_transformer import (
    RecurrenceOptions,
)
from keras_efficient_attn.ops.common.checks import (
    check_bool,
    check_name,
    check_positive_int,
)

ARCHITECTURES = ("decoder", "encoder", "encoder_decoder")
# In a layout map: attention layers, `cross_attention` too, and their sublayers.
ATTENTION = ".*attention"
# Other names in the constructor's scope.
OTHER_LOCALS = ("self", "__class__", "dtype", "name", "trainable")
# The attention of a backbone that is given none, and the convolution before it in an
# `"encoder"`; `docs/choosing.md` says why. The decoder's has its own convolutions.
DECODER_ATTENTION = "gated-delta"
ENCODER_ATTENTION = "local:window=64"
ENCODER_CONVOLUTION = 4
# The arguments that accept a shorthand value or a dict of fields.
OPTIONS = {
    "residual": ResidualOptions,
    "feed_forward": FeedForwardOptions,
    "positions": PositionOptions,
    "recurrence": RecurrenceOptions,
    "embedding": EmbeddingOptions,
}


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class EfficientTransformerBackbone(
    OptionalDocuments, PresetMixin, keras_hub.models.Backbone
):
    """A Transformer backbone for KerasHub, with any of this package's attention layers.

    ```
    x = embeddings(tokens) [+ features(tokens)] [+ positions]
    recurrence times, for each block:
        x = x + attention([convolution](norm(x)))
        x = x + feed_forward(norm(x))
    ```

    Related settings share one argument: an options object, a dict of its fields, or the
    value of its first field.

    Args:
        vocabulary_size: Number of tokens.
        num_layers: Number of blocks; with `"encoder_decoder"`, of the encoder and of
            the decoder.
        num_heads: Attention heads per block.
        hidden_dim: Width of the model.
        intermediate_dim: Width of the feed-forward networks; `None` for blocks without
            one, such as gated attention units.
        attention: The self-attention: a name with options, such as `"gated-delta"` or
            `"softmax:dropout=0.1"` (see `keras_efficient_attn.layers.get_attention`),
            the configuration of a layer from `keras.saving.serialize_keras_object`, or
            a layer. Either one for all blocks, or a list that the blocks cycle through.
            A layer is a template: each block gets a new layer with its configuration
            and the backbone's `dtype`. Defaults to `None`: `"gated-delta"` in decoders,
            which has no rotary positions, and in encoders, which a causal layer does
            not suit, `"local:window=64"`, without other `positions` with rotary ones.
        head_dim: Width of a head. Defaults to `hidden_dim / num_heads`.
        architecture: `"decoder"` (causal, the default), `"encoder"`, or
            `"encoder_decoder"`.
        cross_attention: The attention of a decoder to its encoder, as `attention`,
            one for all blocks. Defaults to `"softmax"`.
        encoder_attention: The self-attention of the encoder of an
            `"encoder_decoder"`, as `attention`. Defaults to `None`: the decoder's, or
            that of encoders without an `attention`.
        residual: `ResidualOptions`, or a kind: `"pre_norm"` (the default),
            `"post_norm"`, `"reordered"`, `"update_norm"`, `"gated"`, `"reversible"`, or
            a tuple through which the blocks cycle.
        feed_forward: `FeedForwardOptions`, or an activation. Defaults to `"gelu"`.
        positions: `PositionOptions`, or a kind: `"sinusoidal"`, `"rotary"`, or `None`
            (the default). `"learned"` positions need a `max_length`.
        recurrence: `RecurrenceOptions`, or the number of times that all blocks are
            applied with the same weights. Defaults to 1.
        convolution: Kernel size of a depthwise causal convolution before each
            self-attention, such as 4. Defaults to `None`: no convolution, but 4 in an
            `"encoder"` without an `attention`.
        embedding: `EmbeddingOptions`, or `"tied"` (the default) or `"untied"`: whether
            the output projection of language models shares the embedding.
        use_bias: Whether dense layers, projections and layer norms have biases.
            Defaults to `True`.
        dropout: Rate of dropout on embeddings and sublayers' outputs. Defaults to 0.
        takes_documents: Whether a row may hold several documents, one after the other:
            the inputs may then have `document_ids`. For `"decoder"` and `"encoder"`.
            Defaults to `False`.
        transformers_config: The `config.json` of the checkpoint of transformers that
            the arguments are from, a dict, which `export_to_transformers` writes;
            `from_preset` sets it. Defaults to `None`.
        dtype: Policy of all layers.
        name, trainable: Arguments of `keras.Model`.

    Call arguments:
        inputs: Dict of integers `token_ids` and `padding_mask` (1, and 0 at padding,
            anywhere in a row), `(batch, length)`; both may be `None` in shape. With
            `"encoder_decoder"`: `encoder_token_ids`, `encoder_padding_mask`,
            `decoder_token_ids`, `decoder_padding_mask`. With `takes_documents`,
            optionally integers `document_ids`: a document begins where they change,
            and has the outputs of a row of its own.

    Returns:
        `(batch, length, hidden_dim)`; twice as wide with concatenated streams of
        `ResidualOptions`. With `"encoder_decoder"`, a dict of
        `encoder_sequence_output` and `decoder_sequence_output`.

    Raises:
        ValueError: For an argument named above that cannot be honoured.
        TypeError: If `attention` is not one of the kinds above.

    Example:

    ```python
    import keras
    from keras_efficient_attn.models import (
        EfficientTransformerBackbone,
        FeedForwardOptions,
    )

    backbone = EfficientTransformerBackbone(
        vocabulary_size=256,
        num_layers=4,
        num_heads=4,
        hidden_dim=64,
        intermediate_dim=256,
        attention=["gated-delta"] * 3 + ["softmax:rotary_wavelength=10000"],
        feed_forward=FeedForwardOptions("silu", gated=True),
    )
    tokens = keras.random.randint((2, 100), 0, 256)
    hidden = backbone({"token_ids": tokens, "padding_mask": keras.ops.ones((2, 100))})
    ```

    A preset configuration of the package, with random weights:

    ```python
    backbone = EfficientTransformerBackbone.from_preset(
        "performer_6l", load_weights=False
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
        attention=None,
        head_dim=None,
        architecture: str = "decoder",
        cross_attention="softmax",
        encoder_attention=None,
        residual="pre_norm",
        feed_forward="gelu",
        positions=None,
        recurrence=1,
        convolution: int | None = None,
        embedding="tied",
        use_bias: bool = True,
        dropout: float = 0.0,
        takes_documents: bool = False,
        transformers_config=None,
        dtype=None,
        name=None,
        trainable: bool = True,
    ):
        # The arguments that describe the backbone, by name. Without **kwargs, because
        # Keras silently accepts unknown ones.
        options = SimpleNamespace(
            **{key: value for key, value in locals().items() if key not in OTHER_LOCALS}
        )
        _normalize(options)
        _check(options)

        # === Layers ===
        layers = BackboneLayers(options, dtype)
        embedding_layer = layers.embedding()
        encoder = decoder = None
        if architecture != "decoder":
            encoder = layers.stack("encoder", causal=False)
        if architecture != "encoder":
            decoder = layers.stack(
                "decoder", causal=True, cross=architecture == "encoder_decoder"
            )

        if takes_documents:
            _check_documents(encoder or decoder)

        # === Functional model ===
        inputs, outputs = _connect(embedding_layer, encoder, decoder, takes_documents)
        super().__init__(
            inputs=inputs, outputs=outputs, dtype=dtype, name=name, trainable=trainable
        )

        # === Config ===
        self.embedding = embedding_layer
        self.encoder = encoder
        self.decoder = decoder
        self.token_embedding = embedding_layer.token_embedding
        self.transformer_layers = [
            block
            for stack in (encoder, decoder)
            if stack is not None
            for block in stack.blocks
        ]
        self.vocabulary_size = vocabulary_size
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.hidden_dim = hidden_dim
        self.architecture = architecture
        self.max_sequence_length = options.positions.limit
        self.transformers_config = transformers_config
        self._options = options

    def get_initial_state(self, batch_size, max_length=None, memory_length=None):
        """The state before the first token, for `stream`.

        Args:
            batch_size: Rows in the batch.
            max_length: The longest context, for layers whose state grows with it.
                `None` allows any context; those layers raise for it.
            memory_length: Memory length of `RelativePositionXL` layers. Defaults to the
                length that reproduces one call on the whole context; without
                `max_length`, to the layers' own.

        Returns:
            A nest of dicts of tensors, batch first.

        Raises:
            ValueError: If the architecture is `"encoder"`, a layer does not stream, or
                there are fewer learned positions than `max_length`.
        """
        if self.architecture == "encoder":
            raise ValueError(
                "Only a backbone with a decoder has a state. Received: "
                f"architecture={self.architecture!r}"
            )
        limit = self.max_sequence_length
        if limit is not None and (max_length is None or max_length > limit):
            raise ValueError(
                f"`max_length` must be given, and at most {limit}, the number of "
                f"positions of the backbone. Received: max_length={max_length}"
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
                "`encode` needs a backbone with architecture='encoder_decoder'. "
                f"Received: architecture={self.architecture!r}"
            )
        x = self.embedding(token_ids, padding_mask=padding_mask)
        return self.encoder(x, padding_mask=padding_mask)

    def stream(
        self,
        token_ids,
        state,
        memory=None,
        memory_padding_mask=None,
        padding_mask=None,
        training=None,
    ):
        """Reads a segment of a sequence, down to a single token.

        Reading the segments of a sequence in order gives the outputs of one call on the
        whole sequence.

        Args:
            token_ids: Integers `(batch, length)`.
            state: From `get_initial_state` or the previous segment's call.
            memory: The encoder's output, from `encode`, for a decoder with an encoder.
            memory_padding_mask: Optional `(batch, memory_length)`, 0 at padding.
            padding_mask: Optional `(batch, length)`, 0 at padding, anywhere in a row:
                rows may read segments of different lengths.
            training: Whether to apply dropout and let layers learn in their calls.

        Returns:
            `(hidden, state)`: `(batch, length, hidden_dim)`, and the new state, in
            which each row has its own position.

        Raises:
            ValueError: If there is an encoder and no `memory`, or a `memory` and no
                encoder.
        """
        if (memory is not None) != (self.architecture == "encoder_decoder"):
            raise ValueError(
                "`memory` must be given with architecture='encoder_decoder', and only "
                f"then. Received: architecture={self.architecture!r}, memory given: "
                f"{memory is not None}"
            )
        x, embedding_state = self.embedding(
            token_ids,
            padding_mask=padding_mask,
            state=state["embedding"],
            training=training,
        )
        x, decoder_state = self.decoder(
            x,
            padding_mask=padding_mask,
            memory=memory,
            memory_padding_mask=memory_padding_mask,
            state=state["decoder"],
            training=training,
        )
        return x, {"embedding": embedding_state, "decoder": decoder_state}

    @staticmethod
    def get_layout_map(
        device_mesh,
        model_parallel_dim_name="model",
        data_parallel_dim_name="batch",
        num_key_value_heads=None,
        sequence_parallel_dim_name=None,
    ):
        """The layout for `keras.distribution.ModelParallel`, on JAX.

        Attention is split by heads, feed-forward networks by their inner width, and
        the embedding by tokens; the other large axis of a kernel is split over the
        data axis, and the inputs of sublayers by rows. The number of heads,
        `hidden_dim`, `intermediate_dim`, `vocabulary_size` and the rows of every batch
        must thus be multiples of the axes' sizes. Small weights are replicated on
        every device.

        Args:
            device_mesh: `keras.distribution.DeviceMesh`.
            model_parallel_dim_name: Its axis for heads, widths and tokens. Defaults to
                `"model"`.
            data_parallel_dim_name: Its axis for the batch. Defaults to `"batch"`.
            num_key_value_heads: The value in attention layers with fewer heads of keys
                and values. If it is not a multiple of the model axis, their projections
                are replicated along this axis. Defaults to `None`: as many as heads of
                queries.
            sequence_parallel_dim_name: Its axis for positions, if `SequenceParallel`
                splits them. Defaults to `None`.

        Returns:
            `keras.distribution.LayoutMap`.

        Raises:
            TypeError: If `device_mesh` is not a `DeviceMesh`.
            ValueError: If it lacks one of the axes.

        Example:

        ```python
        mesh = keras.distribution.DeviceMesh((2, 4), ("batch", "model"))
        layout_map = EfficientTransformerBackbone.get_layout_map(mesh)
        distribution = keras.distribution.ModelParallel(
            layout_map=layout_map, batch_dim_name="batch"
        )
        with distribution.scope():
            backbone = EfficientTransformerBackbone(
                vocabulary_size=256,
                num_layers=4,
                num_heads=8,
                hidden_dim=64,
                intermediate_dim=256,
            )
        ```
        """
        model_axis, data_axis = model_parallel_dim_name, data_parallel_dim_name
        sequence_axis = sequence_parallel_dim_name
        _check_mesh(device_mesh, model_axis, data_axis, sequence_axis)
        size = device_mesh.shape[device_mesh.axis_names.index(model_axis)]
        splits = num_key_value_heads is None or num_key_value_heads % size == 0
        shared_axis = model_axis if splits else None
        layouts = {
            # Tokens, and the hidden width.
            ".*token_embedding/embeddings": (model_axis, data_axis),
            ".*token_embedding/(reverse_embeddings|projection/kernel)": (
                data_axis,
                model_axis,
            ),
            # Heads, which are independent between the projections.
            f"{ATTENTION}/(query|gate|output_gate)/kernel": (
                data_axis,
                model_axis,
                None,
            ),
            f"{ATTENTION}/(key|value)/kernel": (data_axis, shared_axis, None),
            f"{ATTENTION}/(decay|beta)/kernel": (None, shared_axis),
            f"{ATTENTION}/feature_decay/kernel": (None, shared_axis, None),
            f"{ATTENTION}/attention_output/kernel": (model_axis, None, data_axis),
            f"{ATTENTION}/(query|key)_feature_kernel": (model_axis, None, None),
            f"{ATTENTION}/rotations": (None, model_axis, None, None),
            f"{ATTENTION}/position(_kernel)?": (None, model_axis, None),
            f"{ATTENTION}/codebook/(sum|last_codes|codes)": (model_axis, None, None),
            f"{ATTENTION}/codebook/(count|usage|idle_calls|error)": (model_axis, None),
            # The inner width of the feed-forward networks and of gated residuals.
            ".*(feed_forward|separable_convolution)/(hidden|gate)/kernel": (
                data_axis,
                model_axis,
            ),
            ".*(feed_forward|separable_convolution)/output/kernel": (
                model_axis,
                data_axis,
            ),
            ".*_residual/gate/(reset|gate|candidate)_(update|stream)": (
                data_axis,
                model_axis,
            ),
            # Inputs of sublayers. Without this, XLA may gather the rows of the batch
            # where weights are split over the data axis.
            ".*(_residual/|final_)norm/output": (data_axis, sequence_axis, None),
        }
        layout_map = keras.distribution.LayoutMap(device_mesh)
        for pattern, layout in layouts.items():
            layout_map[pattern] = layout
        return layout_map

    @classmethod
    def from_checkpoint(cls, preset, config, load_weights, **kwargs):
        """What `from_preset` does with a checkpoint whose `config.json` is `config`."""
        return read_backbone(cls, preset, config, load_weights, **kwargs)

    def export_to_transformers(self, path, max_shard_size=5_000_000_000):
        """Writes the model in the format of transformers, as it has been trained.

        A model with LoRA is written with its update. For a backbone that `from_preset`
        made from such a folder or handle: the `config.json` is the same.

        Args:
            path: A folder, which is made if it does not exist.
            max_shard_size: Bytes of tensors in one file. Defaults to 5 GB.

        Raises:
            ValueError: If the backbone has no `transformers_config`, or is quantised.
        """
        export_backbone(self, path, max_shard_size)

    def load_lora_weights(self, filepath):
        check_lora_file(filepath)
        super().load_lora_weights(filepath)

    def get_config(self):
        config = {
            name: value.get_config() if isinstance(value, Options) else value
            for name, value in vars(self._options).items()
        }
        return {**super().get_config(), **config}


def _normalize(options):
    """Replaces shorthands by options objects, and layers by their configurations."""
    for key, kind in OPTIONS.items():
        setattr(options, key, kind.get(key, getattr(options, key)))
    if options.attention is None:
        encoder = ENCODER_ATTENTION
        if options.positions.kind is None:
            encoder += f",rotary_wavelength={MAX_WAVELENGTH}"
        is_encoder = options.architecture == "encoder"
        options.attention = encoder if is_encoder else DECODER_ATTENTION
        if is_encoder and options.convolution is None:
            options.convolution = ENCODER_CONVOLUTION
        if options.architecture == "encoder_decoder" and (
            options.encoder_attention is None
        ):
            options.encoder_attention = encoder
    for name in ("attention", "encoder_attention"):
        attention = getattr(options, name)
        if isinstance(attention, list | tuple):
            setattr(options, name, [attention_spec(item) for item in attention])
        elif attention is not None:
            setattr(options, name, attention_spec(attention))
    options.cross_attention = attention_spec(options.cross_attention)


def _check_documents(stack):
    for block in stack.blocks:
        if not block.attention.takes_documents:
            raise ValueError(
                "`takes_documents` needs attention layers that keep documents apart. "
                f"Received: attention={block.attention!r}, with "
                f"{block.attention.get_config()}"
            )


def _connect(embedding, encoder, decoder, takes_documents):
    """The inputs and outputs of the Functional model.

    Args:
        embedding: The embedding layer.
        encoder, decoder: Stacks of blocks, of which one may be `None`.
        takes_documents: Whether there is an optional input of `document_ids`.
    """

    def sequence_inputs(prefix=""):
        return {
            name: keras.Input((None,), dtype="int32", name=name)
            for name in (f"{prefix}token_ids", f"{prefix}padding_mask")
        }

    if encoder is None or decoder is None:
        inputs = sequence_inputs()
        mask, rows = inputs["padding_mask"], {}
        if takes_documents:
            rows["document_ids"] = inputs["document_ids"] = keras.Input(
                (None,), dtype="int32", name="document_ids", optional=True
            )
        x = embedding(inputs["token_ids"], padding_mask=mask, **rows)
        return inputs, (encoder or decoder)(x, padding_mask=mask, **rows)
    inputs = sequence_inputs("encoder_") | sequence_inputs("decoder_")
    encoder_mask = inputs["encoder_padding_mask"]
    decoder_mask = inputs["decoder_padding_mask"]
    memory = encoder(
        embedding(inputs["encoder_token_ids"], padding_mask=encoder_mask),
        padding_mask=encoder_mask,
    )
    outputs = {
        "encoder_sequence_output": memory,
        "decoder_sequence_output": decoder(
            embedding(inputs["decoder_token_ids"], padding_mask=decoder_mask),
            padding_mask=decoder_mask,
            memory=memory,
            memory_padding_mask=encoder_mask,
        ),
    }
    return inputs, outputs


def _check(options):
    """Raises `ValueError` for combinations that the layers do not check."""
    sizes = ("vocabulary_size", "num_layers", "num_heads", "hidden_dim")
    for name in sizes:
        check_positive_int(name, getattr(options, name))
    for name in ("head_dim", "intermediate_dim"):
        check_positive_int(name, getattr(options, name), True)
    check_bool("takes_documents", options.takes_documents)
    if options.takes_documents and options.architecture == "encoder_decoder":
        raise ValueError(
            "`takes_documents=True` needs architecture='decoder' or 'encoder'. "
            "Received: takes_documents=True, architecture='encoder_decoder'"
        )
    feed_forward = options.feed_forward
    if options.intermediate_dim is None and feed_forward != FeedForwardOptions():
        raise ValueError(
            "`feed_forward` needs an `intermediate_dim`. Received: "
            f"feed_forward={feed_forward}, intermediate_dim=None"
        )
    if options.head_dim is None and options.hidden_dim % options.num_heads:
        raise ValueError(
            "`hidden_dim` must be a multiple of `num_heads`; otherwise, give "
            f"`head_dim`. Received: hidden_dim={options.hidden_dim}, "
            f"num_heads={options.num_heads}"
        )
    for name in ("attention", "encoder_attention"):
        if getattr(options, name) == []:
            raise ValueError(
                f"`{name}` must have at least one layer. Received: {name}=[]"
            )
    check_name("architecture", options.architecture, ARCHITECTURES)
    if (
        options.encoder_attention is not None
        and options.architecture != "encoder_decoder"
    ):
        raise ValueError(
            "`encoder_attention` needs architecture='encoder_decoder'. Received: "
            f"encoder_attention={options.encoder_attention!r}, "
            f"architecture={options.architecture!r}"
        )
    positions = options.positions
    if (
        positions.max_offset
        and options.architecture == "encoder_decoder"
        and not positions.each_layer
    ):
        raise ValueError(
            "`max_offset` of positions with architecture='encoder_decoder' needs "
            "each_layer=True: encoder and decoder share one embedding, whose two calls "
            f"would draw two offsets. Received: max_offset={positions.max_offset!r}"
        )


def _check_mesh(device_mesh, model_axis, data_axis, sequence_axis):
    if not isinstance(device_mesh, keras.distribution.DeviceMesh):
        raise TypeError(
            "`device_mesh` must be a `keras.distribution.DeviceMesh`. Received: "
            f"device_mesh={device_mesh!r}"
        )
    names = {
        "model_parallel_dim_name": model_axis,
        "data_parallel_dim_name": data_axis,
    }
    if sequence_axis is not None:
        names["sequence_parallel_dim_name"] = sequence_axis
    for argument, name in names.items():
        if name not in device_mesh.axis_names:
            raise ValueError(
                f"`{argument}` must be an axis of `device_mesh`, one of "
                f"{list(device_mesh.axis_names)}. Received: {argument}={name!r}"
            )
