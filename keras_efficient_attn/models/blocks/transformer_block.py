"""A Transformer block: attention, cross-attention and a feed-forward network."""

import keras
from keras import ops

from keras_efficient_attn.layers.arguments import KeepsArguments, spec_with_state
from keras_efficient_attn.layers.attention.base import EfficientAttention
from keras_efficient_attn.layers.keras_internals import implicit_mask
from keras_efficient_attn.layers.residual.reversible import Sublayer
from keras_efficient_attn.models.blocks.convolution import (
    SeparableConvolution,
)
from keras_efficient_attn.models.blocks.residual import RESIDUALS
from keras_efficient_attn.ops.common.checks import (
    check_bool,
    check_name,
    check_positive_number,
)

# The arguments of a block that are layers.
LAYERS = ("attention", "feed_forward", "cross_attention", "convolution", "positions")


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class TransformerBlock(KeepsArguments, keras.layers.Layer):
    """Sublayers in residual connections: attention, cross-attention, feed-forward.

    All models of this package use this block, with any attention layer: in an encoder
    with `causal=False`, in a decoder with or without `cross_attention`, pre-norm or
    post-norm, applied once or repeatedly (`UniversalTransformer`).

    Args:
        attention: The self-attention layer, an `EfficientAttention` (such as
            `SoftmaxAttention`).
        feed_forward: The layer after the attention; a `SeparableConvolution` receives
            mask and state. `None` for none, as in gated attention units. Their
            attention has one head, wide values and `use_gate=True`, and SiLU as its
            `value_activation` and `gate_activation`.
        causal: Whether a position sees itself and earlier ones only. Defaults to
            `True`.
        cross_attention: Optional layer that attends to another sequence.
        convolution: Optional layer applied to the self-attention's input.
        positions: Optional layer that adds positions to the block's input.
        residual: `"pre_norm"` (the default), `"post_norm"`, `"reordered"`, `"gated"` or
            a gate's name as for the backbone, or `"reversible"`, for blocks that a
            `TransformerStack` calls.
        norm: `"layer_norm"` (the default) or `"rms_norm"`.
        norm_epsilon: Epsilon of the norms. Defaults to 1e-5.
        use_bias: Whether layer norms have offsets. Defaults to `True`.
        dropout: Rate of dropout on each sublayer's output. Defaults to 0.
        layer_dropout: Rate at which a row of the batch skips a sublayer in training.
            Defaults to 0.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: `(batch, length, dim)`.
        padding_mask: Optional `(batch, length)`, false at padding, anywhere in a row.
            Defaults to Keras' mask of `x`.
        memory: `(batch, memory_length, dim)`, for `cross_attention`.
        memory_padding_mask: Optional `(batch, memory_length)`.
        state: Optional, from `get_initial_state` or the previous segment's call.
        document_ids: Optional integers `(batch, length)`, without a `state`: a document
            begins where they change, and sees no other.

    Returns:
        A tensor of the shape of `x`; `(output, state)` with `state`.

    Raises:
        TypeError: If `attention` is not an `EfficientAttention`.
        ValueError: For an unknown `residual` or `norm`; on a call, for a
            `"reversible"` one, which has two streams, for `document_ids` with a
            `state`, or for a `memory` without `cross_attention` and the reverse.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import PerformerAttention
    >>> from keras_efficient_attn.models import FeedForward, TransformerBlock
    >>> attention = PerformerAttention(num_heads=2, key_dim=8)
    >>> block = TransformerBlock(attention, FeedForward(64))
    >>> block(keras.random.normal((2, 10, 16))).shape
    (2, 10, 16)

    Reference:
        - [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762)
        - [Xiong et al., 2020](https://arxiv.org/abs/2002.04745), on pre-norm
        - [Hua et al., 2022](https://arxiv.org/abs/2202.10447), the gated attention unit
    """

    def __init__(
        self,
        attention,
        feed_forward,
        causal: bool = True,
        cross_attention=None,
        convolution=None,
        positions=None,
        residual="pre_norm",
        norm="layer_norm",
        norm_epsilon: float = 1e-5,
        use_bias: bool = True,
        dropout: float = 0.0,
        layer_dropout: float = 0.0,
        **kwargs,
    ):
        # autocast=False: a state stays float32 under a mixed policy.
        super().__init__(autocast=False, **kwargs)
        self.supports_masking = True
        if not isinstance(attention, EfficientAttention):
            raise TypeError(
                "`attention` must be an `EfficientAttention`, such as "
                f"`SoftmaxAttention`. Received: attention={attention!r}"
            )
        self.keep(locals())
        check_name("residual", residual, RESIDUALS)
        check_bool("causal", causal)
        check_bool("use_bias", use_bias)
        check_positive_number("norm_epsilon", norm_epsilon)

        def connection(name):
            return RESIDUALS[residual](
                norm,
                norm_epsilon,
                use_bias,
                dropout,
                layer_dropout,
                dtype=self.dtype_policy,
                name=f"{name}_residual",
            )

        self.attention_residual = connection("attention")
        self.cross_attention_residual = None
        if cross_attention is not None:
            self.cross_attention_residual = connection("cross_attention")
        self.feed_forward_residual = None
        if feed_forward is not None:
            self.feed_forward_residual = connection("feed_forward")
        # A layer that stores its inputs normalises the inputs and its memory itself.
        self._attention_normalizes = convolution is None and attention.remembers_inputs
        if self._attention_normalizes:
            attention.input_norm = self.attention_residual.before

    def build(self, x_shape, memory_shape=None, **shapes):
        for layer in (
            self.positions,
            self.attention_residual,
            self.convolution,
            self.cross_attention_residual,
            self.feed_forward_residual,
            self.feed_forward,
        ):
            if layer is not None and not layer.built:
                layer.build(x_shape)
        if not self.attention.built:
            self.attention.build(x_shape, x_shape)
        # Raise at build time, not on the first call.
        x = keras.KerasTensor(x_shape)
        self.attention.compute_output_spec(x, x, use_causal_mask=self.causal)
        if self.cross_attention is not None and not self.cross_attention.built:
            self._check_memory(memory_shape)
            self.cross_attention.build(x_shape, memory_shape)

    def get_initial_state(self, batch_size, max_length=None, memory_length=None):
        """The state before the first position, a dict, batch first.

        Args:
            batch_size: Rows in the batch.
            max_length: The longest context, for layers whose state grows with it.
                Defaults to `None`, for which those layers raise.
            memory_length: Memory length of a `RelativePositionXL`. Defaults to the
                length that the context needs.
        """
        attention = self.attention
        length = max_length if attention.state_grows else None
        if attention.remembers_inputs and memory_length is not None:
            length = memory_length
        state = {"attention": attention.get_initial_state(batch_size, length)}
        if self.convolution is not None:
            state["convolution"] = self.convolution.get_initial_state(batch_size)
        if self.positions is not None:
            state["positions"] = self.positions.get_initial_state(batch_size)
        if self._convolves:
            state["feed_forward"] = self.feed_forward.get_initial_state(batch_size)
        return state

    def call(
        self,
        x,
        padding_mask=None,
        memory=None,
        memory_padding_mask=None,
        state=None,
        training=None,
        document_ids=None,
    ):
        if self.residual == "reversible":
            raise ValueError(
                "A block with residual='reversible' has two streams: call the "
                "`TransformerStack` that it belongs to. Received: a call"
            )
        self._check_memory(memory)
        if padding_mask is None:
            padding_mask = implicit_mask(x)
        x = ops.cast(x, self.compute_dtype)
        rows = {"mask": padding_mask}
        if document_ids is not None:
            check_no_state(state)
            rows["document_ids"] = document_ids
        positions_state = {}
        if self.positions is not None:
            x, positions_state = self._with_positions(x, rows, state, training)
        h, attention_state = self._attend(x, rows, state, training)
        x = self.attention_residual.after(x, h, training)
        if self.cross_attention is not None:
            h = self._attend_to_memory(
                x, padding_mask, memory, memory_padding_mask, training
            )
            x = self.cross_attention_residual.after(x, h, training)
        transition_state = {}
        if self.feed_forward is not None:
            h, transition_state = self._transition(x, rows, state, training)
            x = self.feed_forward_residual.after(x, h, training)
        if state is None:
            return x
        return x, positions_state | attention_state | transition_state

    def _check_memory(self, memory):
        """Raises `ValueError` unless it is given where there is `cross_attention`."""
        if (memory is None) != (self.cross_attention is None):
            raise ValueError(
                "`memory` must be given to a block with `cross_attention`, and only to "
                f"one. Received: cross_attention={self.cross_attention!r}, memory "
                f"given: {memory is not None}"
            )

    def sublayers(
        self,
        padding_mask,
        memory,
        memory_padding_mask,
        document_ids,
        state,
        training,
    ):
        """The sublayers that alternately update the streams of a reversible stack.

        Args:
            padding_mask, memory, memory_padding_mask, document_ids, training: As in a
                call.
            state: The block's state, or `None`.

        Returns:
            List of `Sublayer`, whose states are parts of the block's.
        """

        def attend(x, mask=None, **rows):
            rows, positions_state = {"mask": mask, **rows}, {}
            if self.positions is not None:
                x, positions_state = self._with_positions(x, rows, state, training)
            h, new_state = self._attend(x, rows, state, training)
            h = self.attention_residual.drop(h, training)
            return h, positions_state | new_state

        def attend_to_memory(x, memory, padding_mask=None, memory_padding_mask=None):
            h = self._attend_to_memory(
                x, padding_mask, memory, memory_padding_mask, training
            )
            return self.cross_attention_residual.drop(h, training), {}

        def feed_forward(x, mask=None, **rows):
            rows = {"mask": mask, **rows}
            h, new_state = self._transition(x, rows, state, training)
            return self.feed_forward_residual.drop(h, training), new_state

        sublayers = []

        def add(call, *layers, **tensors):
            layers = [layer for layer in layers if layer is not None]
            tensors = {name: x for name, x in tensors.items() if x is not None}
            sublayers.append(Sublayer(call, layers, tensors))

        if document_ids is not None:
            check_no_state(state)
        if self.cross_attention is not None:
            self._check_memory(memory)
        rows = dict(mask=padding_mask, document_ids=document_ids)
        before = self.positions, self.attention_residual, self.convolution
        add(attend, *before, self.attention, **rows)
        if self.cross_attention is not None:
            layers = self.cross_attention_residual, self.cross_attention
            masks = dict(
                padding_mask=padding_mask, memory_padding_mask=memory_padding_mask
            )
            add(attend_to_memory, *layers, memory=memory, **masks)
        if self.feed_forward is not None:
            layers = self.feed_forward_residual, self.feed_forward
            add(feed_forward, *layers, **(rows if self._convolves else {}))
        return sublayers

    def _with_positions(self, x, rows, state, training):
        rows = {**rows, "training": training}
        if state is None:
            return self.positions(x, **rows), {}
        x, new_state = self.positions(x, **rows, state=state["positions"])
        return x, {"positions": new_state}

    def _attend(self, x, rows, state, training):
        """The self-attention's update, and the new state.

        Args:
            x: `(batch, length, dim)`.
            rows: Dict of the `mask` and, if given, the `document_ids`.
            state, training: As in a call.
        """
        new_state = {}
        h = x if self._attention_normalizes else self.attention_residual.before(x)
        if self.convolution is not None and state is None:
            h = self.convolution(h, **rows)
        elif self.convolution is not None:
            h, new_state["convolution"] = self.convolution(
                h, **rows, state=state["convolution"]
            )
        options = dict(
            key_mask=rows["mask"], use_causal_mask=self.causal, training=training
        )
        if "document_ids" in rows:
            options["document_ids"] = rows["document_ids"]
        if state is None:
            return self.attention(h, h, **options), new_state
        attention_state = state["attention"]
        h, attention_state = self.attention(h, h, state=attention_state, **options)
        new_state["attention"] = attention_state
        return h, new_state

    @property
    def _convolves(self):
        return isinstance(self.feed_forward, SeparableConvolution)

    def _transition(self, x, rows, state, training):
        """The feed-forward's update, and its new state."""
        h = self.feed_forward_residual.before(x)
        if not self._convolves:
            return self.feed_forward(h, training=training), {}
        if state is None:
            return self.feed_forward(h, **rows), {}
        h, new_state = self.feed_forward(h, **rows, state=state["feed_forward"])
        return h, {"feed_forward": new_state}

    def _attend_to_memory(self, x, padding_mask, memory, memory_padding_mask, training):
        return self.cross_attention(
            self.cross_attention_residual.before(x),
            memory,
            query_mask=padding_mask,
            key_mask=memory_padding_mask,
            training=training,
        )

    def compute_output_spec(
        self,
        x,
        padding_mask=None,
        memory=None,
        memory_padding_mask=None,
        state=None,
        training=None,
        document_ids=None,
    ):
        output = keras.KerasTensor(x.shape, dtype=self.compute_dtype)
        return spec_with_state(output, state)

    def get_config(self):
        return {
            **super().get_config(),
            **{
                name: keras.saving.serialize_keras_object(getattr(self, name))
                for name in LAYERS
            },
        }

    @classmethod
    def from_config(cls, config):
        config = {
            name: keras.saving.deserialize_keras_object(value)
            if isinstance(value, dict) and name != "dtype"
            else value
            for name, value in config.items()
        }
        return super().from_config(config)


def check_no_state(state):
    """Raises `ValueError` for a state beside `document_ids`."""
    if state is not None:
        raise ValueError(
            "Blocks and stacks take `document_ids` or a `state`, not both: read the "
            "documents of a stream one after the other. Received: both"
        )
