"""The Universal Transformer: a block that is recurrent in depth."""

import dataclasses

import keras
from keras import ops

from keras_efficient_attn.layers.adaptive_computation.halting import Halting
from keras_efficient_attn.layers.arguments import KeepsArguments
from keras_efficient_attn.layers.options import Options
from keras_efficient_attn.models.blocks.positions import sinusoids
from keras_efficient_attn.models.blocks.transformer_stack import (
    StackResults,
    TransformerStack,
)
from keras_efficient_attn.ops.common.checks import check_name

KINDS = ("learned", "sinusoidal")


@dataclasses.dataclass(frozen=True)
class RecurrenceOptions(Options):
    """The repetition of a backbone's blocks.

    Args:
        num_recurrences: Number of times that all blocks are applied in order, with the
            same weights. Defaults to 1.
        timestep_embedding: `"learned"` or `"sinusoidal"` vectors that distinguish the
            recurrences; encoder and decoder become a `UniversalTransformer`. Defaults
            to `None`.
        adaptive_computation: Dict of options, such as `{"ponder_cost": 0.01}`, or `{}`:
            each position has a learned number of recurrences, at most `num_recurrences`
            (`UniversalTransformer`). Defaults to `None`.
    """

    num_recurrences: int = 1
    timestep_embedding: str | None = None
    adaptive_computation: dict | None = dataclasses.field(default=None, hash=False)

    @property
    def universal(self):
        """Whether encoder and decoder are a `UniversalTransformer`."""
        options = (self.timestep_embedding, self.adaptive_computation)
        return any(option is not None for option in options)


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class UniversalTransformer(TransformerStack):
    """Blocks with shared weights, applied a fixed or learned number of times.

    ```
    for n in range(num_recurrences):
        x = blocks(x + positions + timesteps[n])
    ```

    The blocks determine whether it is an encoder or a decoder (`causal`,
    `cross_attention`) and the attention. With `adaptive_computation`, each position
    halts independently, as in `keras_efficient_attn.AdaptiveComputationTime`. The
    output is the weighted mean of its states. The state of a halted position is carried
    forward unchanged for others to attend to. Padding starts halted, and `add_loss`
    adds the ponder cost. Without `training` the loop ends when all positions have
    halted. With a `state` all steps are computed, because a later position may attend
    to this one in any step.

    Args:
        blocks: List of `TransformerBlock` to repeat, usually one.
        num_recurrences: Number of recurrences; the maximum with `adaptive_computation`.
        positions: Optional layer, `SinusoidalPositions` or `LearnedPositions`, whose
            signal is added in every step; it is the same in all steps of a call.
        timestep_embedding: `"learned"` (the default), `"sinusoidal"`, or `None`: the
            `TimestepEmbedding` of the steps.
        adaptive_computation: Options of `AdaptiveComputationTime`, a dict of
            `epsilon`, `ponder_cost`, `halting_bias`, `early_exit`, `ponder_reduction`;
            `{}` for its defaults. Defaults to `None`: all positions take all steps.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        As `TransformerStack`, and
        return_ponder: Whether to return `(output, ponder)`, with the dict of
            `AdaptiveComputationTime`. Excludes `state`.

    Returns:
        As `TransformerStack`; `(output, ponder)` with `return_ponder`.

    Raises:
        ValueError: For an argument out of range, blocks with `residual="reversible"`,
            or a call with `return_ponder` without `adaptive_computation` or with
            `state`, or with `return_layers` and `adaptive_computation` or `state`.

    Example:

    ```python
    import keras
    from keras_efficient_attn import LocalAttention, models

    block = models.TransformerBlock(
        LocalAttention(num_heads=2, key_dim=8, window=4),
        models.FeedForward(hidden_dim=64),
        causal=False,
    )
    encoder = models.UniversalTransformer(
        [block],
        num_recurrences=6,
        positions=models.SinusoidalPositions(max_offset=100),
        adaptive_computation={"ponder_cost": 0.01},
    )
    y, ponder = encoder(keras.random.normal((2, 10, 16)), return_ponder=True)
    ```

    Reference:
        - [Dehghani et al., 2019](https://arxiv.org/abs/1807.03819)
    """

    # Steps are not layers: positions may halt between them.
    returns_layers = False

    def __init__(
        self,
        blocks,
        num_recurrences,
        positions=None,
        timestep_embedding: str | None = "learned",
        adaptive_computation=None,
        **kwargs,
    ):
        super().__init__(blocks, num_recurrences, **kwargs)
        if self.is_reversible:
            raise ValueError(
                "Timesteps and adaptive computation cannot be used with "
                "residual='reversible'. Received: residual='reversible'"
            )
        self.positions = positions
        self.timestep_embedding = None
        if timestep_embedding is not None:
            self.timestep_embedding = TimestepEmbedding(
                num_recurrences,
                timestep_embedding,
                dtype=self.dtype_policy,
                name="timestep_embedding",
            )
        self.adaptive_computation = adaptive_computation
        if adaptive_computation is not None:
            self.halting = _halting(
                adaptive_computation, num_recurrences, self.dtype_policy
            )

    def build(self, x_shape, memory_shape=None, **shapes):
        super().build(x_shape, memory_shape)
        for layer in (self.positions, self.timestep_embedding, self.halting):
            if layer is not None:
                layer.build(x_shape)

    def get_initial_state(self, batch_size, max_length=None, memory_length=None):
        state = super().get_initial_state(batch_size, max_length, memory_length)
        if self.positions is not None:
            state["positions"] = self.positions.get_initial_state(batch_size)
        return state

    def _recur(self, x, inputs, state, training, keep_layers):
        signal, new_state, layers = None, {}, []
        if self.positions is not None:
            signal, positions_state = self.positions.signal(
                x,
                inputs["padding_mask"],
                None if state is None else state["positions"],
                training,
                inputs["document_ids"],
            )
            if state is not None:
                new_state["positions"] = positions_state

        def step(n, x):
            x = x if signal is None else x + ops.cast(signal, x.dtype)
            if self.timestep_embedding is not None:
                x = self.timestep_embedding(x, step=n)
            x, results = self._apply_blocks(n, x, inputs, state, training, keep_layers)
            new_state.update(results.state)
            layers.extend(results.layers)
            return x

        if self.halting is None:
            for n in range(self.num_recurrences):
                x = step(n, x)
            return x, StackResults(new_state, layers)
        running = ops.ones_like(x[..., 0], dtype="bool")
        if inputs["padding_mask"] is not None:
            real = ops.cast(inputs["padding_mask"], "bool")
            running = ops.logical_and(running, real)
        x = ops.where(running[..., None], x, ops.zeros_like(x))
        output, ponder = self.halting.ponder(
            step,
            x,
            lambda state: state,
            running,
            # Later positions attend to this position's states of all steps.
            training or state is not None,
        )
        if self.halting.ponder_cost and state is None:
            self.add_loss(self.halting.cost(ponder, running))
        return ops.cast(output, self.compute_dtype), StackResults(new_state, [], ponder)

    def get_config(self):
        return {
            **super().get_config(),
            "positions": keras.saving.serialize_keras_object(self.positions),
            "timestep_embedding": getattr(self.timestep_embedding, "kind", None),
            "adaptive_computation": self.adaptive_computation,
        }

    @classmethod
    def from_config(cls, config):
        positions = keras.saving.deserialize_keras_object(config["positions"])
        return super().from_config({**config, "positions": positions})


def _halting(options, max_steps, dtype):
    known = ("epsilon", "ponder_cost", "halting_bias", "early_exit", "ponder_reduction")
    if not isinstance(options, dict) or set(options) - set(known):
        raise ValueError(
            f"`adaptive_computation` must be None or a dict of {', '.join(known)}. "
            f"Received: adaptive_computation={options!r}"
        )
    return Halting(max_steps, **options, dtype=dtype, name="halting")


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class TimestepEmbedding(KeepsArguments, keras.layers.Layer):
    """Adds a vector for the step number to all positions.

    Args:
        num_steps: Number of steps.
        kind: `"learned"` (the default), a learned vector for each step, or
            `"sinusoidal"`: sines and cosines of the step number.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: `(batch, length, dim)`.
        step: Number of the step, from 0: an integer or a scalar tensor.

    Returns:
        A tensor of the shape of `x`.

    Raises:
        ValueError: For an unknown `kind`.

    Reference:
        - [Dehghani et al., 2019](https://arxiv.org/abs/1807.03819)
    """

    def __init__(self, num_steps, kind="learned", **kwargs):
        super().__init__(**kwargs)
        check_name("timestep_embedding", kind, KINDS)
        self.keep(locals())

    def build(self, x_shape, step_shape=None):
        if self.kind == "learned":
            self.table = self.add_weight(
                name="table",
                shape=(self.num_steps, x_shape[-1]),
                initializer=keras.initializers.RandomNormal(stddev=0.02),
            )

    def call(self, x, step):
        if self.kind == "learned":
            return x + ops.take(self.table, step, axis=0)
        return x + sinusoids(step, x.shape[-1], self.compute_dtype)

    def compute_output_shape(self, x_shape, step_shape=None):
        return x_shape
