"""A stack of Transformer blocks."""

import typing

import keras
from keras import ops

from keras_efficient_attn.layers.arguments import spec_with_state
from keras_efficient_attn.layers.keras_internals import implicit_mask
from keras_efficient_attn.layers.replicas import ReplicaLosses
from keras_efficient_attn.layers.residual.reversible import (
    plain_residuals,
    reversible_residuals,
    stream_dtype,
)
from keras_efficient_attn.models.blocks.residual import STREAMS, get_norm
from keras_efficient_attn.models.blocks.transformer_block import LAYERS
from keras_efficient_attn.ops.common.checks import (
    check_bool,
    check_name,
    check_positive_int,
    check_rate,
)


class StackResults(typing.NamedTuple):
    """The results of a stack besides its output.

    Attributes:
        state: Dict of the blocks' new states, by application.
        layers: List of the outputs of all applications, if kept.
        ponder: The statistics of adaptive computation, or `None`.
    """

    state: dict
    layers: list
    ponder: dict | None = None


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class TransformerStack(ReplicaLosses, keras.layers.Layer):
    """A sequence of blocks, with a final norm if their residuals need one.

    With `residual="reversible"` the sublayers of all blocks alternately update two
    streams. Both start as `x`, and their mean is the output. In training, the
    activations are rebuilt in the backward pass instead of kept.

    `AdaptiveSpan` layers with `relative_positions="shared"` and `RelativePositionXL`
    layers with `biases="shared"` share these weights.

    Args:
        blocks: List of `TransformerBlock`, at least one. Either all of them have
            `residual="reversible"`, or none.
        num_recurrences: How often the blocks are applied, with the same weights.
            Defaults to 1.
        final_norm: Whether a norm follows the last block, of the same kind as that
            block's. Defaults to `None`: what the paper of that block's residual has,
            see `ResidualOptions`.
        output_dropout: Rate of dropout on the output. Defaults to 0.
        streams: `"mean"` (the default) or `"concatenated"`, twice as wide: the output
            of reversible residuals. Others have one stream, and only `"mean"`.
        **kwargs: Those of `keras.layers.Layer`.

    Call arguments:
        As `TransformerBlock`; the state has an entry for each application of a block.
        return_layers: Whether to also return the output of every application of a
            block, before the final norm. Excludes `state`. A reversible stack then
            keeps the activations of each application's ends. Defaults to `False`.

    Returns:
        A tensor of the shape of `x`, or twice as wide with concatenated `streams`;
        `(output, state)` with `state`; `(output, layers)` with `return_layers`, a list.

    Raises:
        ValueError: If `num_recurrences` is not a positive integer, there are no blocks,
            a layer occurs in two of them, only some of them are `"reversible"`, or
            `streams` is unknown or `"concatenated"` for other residuals; on a call, for
            `return_layers` with `state`, or a `memory` that no block reads.

    Reference:
        - [Dehghani et al., 2019](https://arxiv.org/abs/1807.03819), on recurrence in
          depth
    """

    # Whether each application of a block has an output, for `return_layers`.
    returns_layers = True

    def __init__(
        self,
        blocks,
        num_recurrences: int = 1,
        final_norm=None,
        output_dropout: float = 0.0,
        streams="mean",
        **kwargs,
    ):
        # autocast=False: a state keeps its float32 under a mixed policy.
        super().__init__(autocast=False, **kwargs)
        self.supports_masking = True
        check_positive_int("num_recurrences", num_recurrences)
        check_bool("final_norm", final_norm, optional=True)
        check_rate("output_dropout", output_dropout)
        self.blocks = list(blocks)
        _check_blocks(self.blocks, streams)
        self.num_recurrences = num_recurrences
        # Set by `UniversalTransformer` only.
        self.adaptive_computation = self.halting = None
        _share_weights(self.blocks)
        self.has_final_norm = final_norm
        self.streams = streams
        self.final_norm = None
        self.output_dropout = keras.layers.Dropout(
            output_dropout, dtype=self.dtype_policy, name="output_dropout"
        )
        last = self.blocks[-1]
        if self.needs_norm(last):
            self.final_norm = get_norm(
                last.norm,
                last.norm_epsilon,
                last.use_bias,
                dtype=self.dtype_policy,
                name="final_norm",
            )

    def needs_norm(self, block):
        """Whether a norm follows this block where its output is the stack's."""
        if self.has_final_norm is None:
            return block.attention_residual.final_norm
        return self.has_final_norm

    @property
    def is_reversible(self):
        """Whether the blocks update two streams."""
        return self.blocks[0].residual == "reversible"

    def build(self, x_shape, memory_shape=None, **shapes):
        for block in self.blocks:
            if not block.built:
                block.build(x_shape, memory_shape)
        if self.final_norm is not None:
            self.final_norm.build((*x_shape[:-1], self._output_width(x_shape[-1])))

    def get_initial_state(self, batch_size, max_length=None, memory_length=None):
        """The state before the first position, a dict, batch first."""
        return {
            name: block.get_initial_state(batch_size, max_length, memory_length)
            for name, block in self._applications()
        }

    def call(
        self,
        x,
        padding_mask=None,
        memory=None,
        memory_padding_mask=None,
        state=None,
        return_layers=False,
        return_ponder=False,
        training=None,
        document_ids=None,
    ):
        self._check_returns(state, return_layers, return_ponder)
        if memory is not None and not any(map(_reads_memory, self.blocks)):
            raise ValueError(
                "`memory` needs blocks with `cross_attention`. Received: memory given, "
                f"blocks={self.blocks!r}"
            )
        if padding_mask is None:
            padding_mask = implicit_mask(x)
        inputs = dict(
            padding_mask=padding_mask,
            memory=memory,
            memory_padding_mask=memory_padding_mask,
            document_ids=document_ids,
        )
        apply = self._apply_reversibly if self.is_reversible else self._recur
        x, results = apply(x, inputs, state, training, return_layers)
        x = x if self.final_norm is None else self.final_norm(x)
        x = self.output_dropout(x, training=training)
        if return_layers:
            return x, results.layers
        if return_ponder:
            return x, results.ponder
        return x if state is None else (x, results.state)

    def _check_returns(self, state, return_layers, return_ponder):
        """Raises `ValueError` for results that one call cannot return."""
        if return_layers and state is not None:
            raise ValueError(
                "`return_layers` needs a call without `state`: read the sequence in "
                "one call, or leave out `return_layers`. Received: return_layers=True, "
                "state given: True"
            )
        if return_layers and self.halting is not None:
            raise ValueError(
                "`return_layers` needs adaptive_computation=None. Received: "
                f"adaptive_computation={self.adaptive_computation!r}"
            )
        if return_ponder and (self.halting is None or state is not None):
            raise ValueError(
                "`return_ponder` needs `adaptive_computation` and a call without "
                "`state`. Received: "
                f"adaptive_computation={self.adaptive_computation!r}, state given: "
                f"{state is not None}"
            )

    def _recur(self, x, inputs, state, training, keep_layers):
        """All applications of the blocks: the output, and `StackResults`.

        Args:
            x: `(batch, length, dim)`.
            inputs: Dict of the other arguments of the blocks.
            state: As in a call.
            training: As in a call.
            keep_layers: Whether to return the outputs of all applications.
        """
        new_state, layers = {}, []
        for n in range(self.num_recurrences):
            x, results = self._apply_blocks(n, x, inputs, state, training, keep_layers)
            new_state |= results.state
            layers += results.layers
        return x, StackResults(new_state, layers)

    def _apply_blocks(self, n, x, inputs, state, training, keep_layers=False):
        """Each block applied once, in recurrence n: the output, and `StackResults`."""
        new_state, layers = {}, []
        for i, block in enumerate(self.blocks):
            given = {**inputs, "training": training}
            if not _reads_memory(block):
                given["memory"] = None
            if state is None:
                x = block(x, **given)
            else:
                name = _name(n, i)
                x, new_state[name] = block(x, **given, state=state[name])
            if keep_layers:
                layers.append(x)
        return x, StackResults(new_state, layers)

    def _apply_reversibly(self, x, inputs, state, training, keep_layers):
        """Computes `_recur` for blocks that update two streams."""
        x1 = x2 = ops.cast(x, stream_dtype(self))
        if state is not None:
            return self._stream_reversibly(x1, x2, inputs, state, training)
        chains = [
            block.sublayers(**inputs, state=None, training=training)
            for _, block in self._applications()
        ]
        if not keep_layers:
            # One chain also rebuilds the activations between blocks.
            chains = [sum(chains, [])]
        layers = []
        for sublayers in chains:
            if training:
                x1, x2 = reversible_residuals(self, sublayers, x1, x2)
            else:
                x1, x2, _ = plain_residuals(sublayers, x1, x2)
            x1, x2 = _next_first(sublayers, x1, x2)
            layers.append(self._joined(x1, x2))
        return layers[-1], StackResults({}, layers)

    def _stream_reversibly(self, x1, x2, inputs, state, training):
        """Computes `_apply_reversibly` with a state."""
        new_state = {}
        for name, block in self._applications():
            sublayers = block.sublayers(**inputs, state=state[name], training=training)
            x1, x2, parts = plain_residuals(sublayers, x1, x2)
            x1, x2 = _next_first(sublayers, x1, x2)
            new_state[name] = {k: v for part in parts for k, v in part.items()}
        return self._joined(x1, x2), StackResults(new_state, [])

    def _joined(self, x1, x2):
        if self.streams == "mean":
            return (x1 + x2) / 2
        return ops.concatenate([x1, x2], axis=-1)

    def _output_width(self, width):
        return width if self.streams == "mean" else 2 * width

    def compute_output_spec(
        self,
        x,
        padding_mask=None,
        memory=None,
        memory_padding_mask=None,
        state=None,
        return_layers=False,
        return_ponder=False,
        training=None,
        document_ids=None,
    ):
        self._check_returns(state, return_layers, return_ponder)
        shape = (*x.shape[:-1], self._output_width(x.shape[-1]))
        output = keras.KerasTensor(shape, dtype=self.compute_dtype)
        if return_layers:
            wide = self.is_reversible
            dtype = stream_dtype(self) if wide else self.compute_dtype
            applications = range(self.num_recurrences * len(self.blocks))
            return output, [keras.KerasTensor(shape, dtype) for _ in applications]
        if return_ponder:
            return output, self.halting.specification(x.shape[:2])
        return spec_with_state(output, state)

    def _applications(self):
        """Names and blocks, in the order of computation."""
        for recurrence in range(self.num_recurrences):
            for i, block in enumerate(self.blocks):
                yield _name(recurrence, i), block

    def get_config(self):
        return {
            **super().get_config(),
            "blocks": [
                _unbuilt(keras.saving.serialize_keras_object(block))
                for block in self.blocks
            ],
            "num_recurrences": self.num_recurrences,
            "final_norm": self.has_final_norm,
            "output_dropout": self.output_dropout.rate,
            "streams": self.streams,
        }

    @classmethod
    def from_config(cls, config):
        blocks = keras.saving.deserialize_keras_object(config["blocks"])
        return super().from_config({**config, "blocks": blocks})


def _unbuilt(config):
    """A layer's configuration without build data: the stack builds it and its parts."""
    if not isinstance(config, dict):
        return config
    return {
        name: _unbuilt(value)
        for name, value in config.items()
        if name != "build_config"
    }


def _check_blocks(blocks, streams):
    """Raises `ValueError` for blocks or residuals that a stack cannot have."""
    kinds = list(dict.fromkeys(block.residual for block in blocks))
    layers = [getattr(block, name) for block in blocks for name in LAYERS]
    layers = [id(layer) for layer in (*blocks, *layers) if layer is not None]
    if len(set(layers)) < len(layers):
        raise ValueError(
            "Each of `blocks` must have layers of its own; `num_recurrences` applies "
            f"all blocks again. Received: blocks={blocks!r}"
        )
    if not kinds or ("reversible" in kinds and len(kinds) > 1):
        raise ValueError(
            "`blocks` must be at least one block, and 'reversible' residuals cannot be "
            f"mixed with others. Received: {len(blocks)} blocks, with residuals {kinds}"
        )
    check_name("streams", streams, STREAMS)
    if streams != "mean" and kinds != ["reversible"]:
        raise ValueError(
            "`streams='concatenated'` needs blocks with residual='reversible', which "
            f"have two streams. Received: streams={streams!r}, residual={kinds[0]!r}"
        )


def _reads_memory(block):
    return block.cross_attention is not None


def _share_weights(blocks):
    first = {}
    for attention in (block.attention for block in blocks):
        if attention.shares_with_blocks:
            owner = first.setdefault(type(attention), attention)
            if attention is not owner:
                attention.share_weights_with(owner)
                # The stack shares again when it is loaded.
                attention.shares_unsaved = False


def _next_first(sublayers, x1, x2):
    """The streams, with the one that the next sublayer updates first."""
    return (x2, x1) if len(sublayers) % 2 else (x1, x2)


def _name(recurrence, i):
    """Name of the state of block i in that recurrence."""
    return f"recurrence_{recurrence}_block_{i}"
