"""Agents: a policy and a value from all observations so far."""

import keras
from keras import ops

from keras_efficient_attn import RelativePositionXL
from keras_efficient_attn.models import FeedForward, TransformerBlock, TransformerStack

RESIDUALS = {"gtrxl": "gated", "xl": "post_norm"}


class Recurrent(keras.layers.Layer):
    """LSTM layers with the call interface of a `TransformerStack`."""

    def __init__(self, layers, dim):
        super().__init__()
        self.dim = dim
        self.layers = [
            keras.layers.LSTM(dim, return_sequences=True, return_state=True)
            for _ in range(layers)
        ]

    def build(self, x_shape):
        for layer in self.layers:
            layer.build(x_shape)

    def get_initial_state(self, batch_size, max_length):
        zeros = ops.zeros((batch_size, self.dim))
        return {str(i): (zeros, zeros) for i in range(len(self.layers))}

    def call(self, x, state=None):
        new_state = {}
        for i, layer in enumerate(self.layers):
            start = None if state is None else list(state[str(i)])
            x, *after = layer(x, initial_state=start)
            new_state[str(i)] = tuple(after)
        return x if state is None else (x, new_state)


def make_core(agent, layers, heads, dim, memory_length):
    """The layers with memory: `(batch, length, dim)` to the same, with a state."""
    if agent == "lstm":
        return Recurrent(layers, dim)
    blocks = [
        TransformerBlock(
            RelativePositionXL(heads, dim // heads, memory_length=memory_length),
            FeedForward(2 * dim, activation="relu"),
            residual=RESIDUALS[agent],
        )
        for _ in range(layers)
    ]
    return TransformerStack(blocks)


class Agent(keras.Model):
    """Logits of the actions and the value of the current state.

    Args:
        core: From `make_core`.
        dim: Width of the core.
        num_actions: Actions to choose from.

    Call arguments:
        inputs: Observations `(batch, length, channels)`, from the beginning of the
            episodes; or a dict of `observations` and `state`, for the next
            observations.

    Returns:
        `(batch, length, num_actions + 1)`; with a state, a dict of these `outputs` and
        the new `state`.
    """

    def __init__(self, core, dim, num_actions):
        super().__init__()
        self.core = core
        self.encoder = keras.layers.Dense(dim)
        self.policy = keras.layers.Dense(num_actions)
        self.value = keras.layers.Dense(1)

    def call(self, inputs):
        streamed = isinstance(inputs, dict)
        x = self.encoder(inputs["observations"] if streamed else inputs)
        if streamed:
            x, state = self.core(x, state=inputs["state"])
        else:
            x = self.core(x)
        outputs = ops.concatenate([self.policy(x), self.value(x)], axis=-1)
        return {"outputs": outputs, "state": state} if streamed else outputs


def actor_critic_loss(entropy_weight):
    """The loss of a position; targets hold its action, advantage, return and weight."""

    def loss(y_true, y_pred):
        action, advantage, target, weight = ops.unstack(y_true, 4, axis=-1)
        log_policy = ops.log_softmax(y_pred[..., :-1])
        chosen = ops.one_hot(ops.cast(action, "int32"), log_policy.shape[-1])
        log_chosen = ops.sum(chosen * log_policy, axis=-1)
        entropy = -ops.sum(ops.exp(log_policy) * log_policy, axis=-1)
        policy_loss = -advantage * log_chosen - entropy_weight * entropy
        value_loss = 0.5 * ops.square(y_pred[..., -1] - target)
        return weight * (policy_loss + value_loss)

    return loss
