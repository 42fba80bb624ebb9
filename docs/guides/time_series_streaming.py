"""
Title: Forecast a time series as it arrives
Description: A model is trained on whole series, and then reads one value at a time.
"""

"""
## Introduction

A model of a sensor is trained on recorded series, and used on values that arrive one by
one. With softmax attention, each new value costs a pass over all earlier values. A layer
with a state of constant size reads only the new value and the state. Its cost per value is
the same after a day and after a year, and its outputs are those of the whole series.

## Setup
"""

import time

import keras
import matplotlib.pyplot as plt
import numpy as np

from keras_efficient_attn import GatedDeltaAttention

keras.utils.set_random_seed(0)

LENGTH = 672  # Four weeks of hours.
TRAINING_SERIES = 512
VALIDATION_SERIES = 64
EPOCHS = 12
STREAM_LENGTH = 2688

"""
## Make the data

A series has hourly values: the sum of a daily pattern, a weekly pattern, and noise that
lasts for some hours. The patterns differ from series to series. The inputs include the next
hour and weekday; the model has to infer their effect on this series from earlier values.
"""


def make_series(number, length, seed):
    random = np.random.default_rng(seed)
    hours = np.arange(length)
    # A shape for each hour of the day and for each day of the week.
    day = random.normal(size=(number, 24))[:, hours % 24]
    week = random.normal(size=(number, 7))[:, hours // 24 % 7]
    noise = np.zeros((number, length))
    for t in range(1, length):
        noise[:, t] = 0.8 * noise[:, t - 1] + 0.2 * random.normal(size=number)
    return (day + week + noise)[..., None].astype("float32")


def inputs_and_targets(series):
    """Each value with the hour and the weekday of the next one, which is the target."""
    next_hours = np.arange(1, series.shape[1])
    calendar = np.eye(24)[next_hours % 24], np.eye(7)[next_hours // 24 % 7]
    calendar = np.concatenate(calendar, axis=-1).astype("float32")
    calendar = np.broadcast_to(calendar, (len(series), *calendar.shape))
    return np.concatenate([series[:, :-1], calendar], axis=-1), series[:, 1:]


training = make_series(TRAINING_SERIES, LENGTH + 1, seed=1)
validation = make_series(VALIDATION_SERIES, LENGTH + 1, seed=2)
print(f"{len(training)} series to train on, {len(validation)} held out")

"""
## Build the model

Without states, `call` reads whole series, as `fit` requires. With states, it reads the next
values, and also returns the new states. Each attention layer has its own state.
"""


class Forecaster(keras.Model):
    def __init__(self, num_layers=2, dim=64):
        super().__init__()
        self.inputs_to_hidden = keras.layers.Dense(dim)
        self.norms = [keras.layers.LayerNormalization() for _ in range(num_layers)]
        self.attention = [
            GatedDeltaAttention(num_heads=2, key_dim=32) for _ in range(num_layers)
        ]
        self.feed_forward = [
            keras.Sequential(
                [
                    keras.layers.LayerNormalization(),
                    keras.layers.Dense(2 * dim, activation="gelu"),
                    keras.layers.Dense(dim),
                ]
            )
            for _ in range(num_layers)
        ]
        self.hidden_to_outputs = keras.layers.Dense(1)

    def call(self, inputs, states=None):
        x = self.inputs_to_hidden(inputs)
        new_states = []
        layers = zip(self.norms, self.attention, self.feed_forward)
        for i, (norm, attention, feed_forward) in enumerate(layers):
            y = norm(x)
            if states is None:
                y = attention(y, y, use_causal_mask=True)
            else:
                y, state = attention(y, y, use_causal_mask=True, state=states[i])
                new_states.append(state)
            x = x + y
            x = x + feed_forward(x)
        outputs = self.hidden_to_outputs(x)
        return outputs if states is None else (outputs, new_states)

    def get_initial_state(self, batch_size):
        return [layer.get_initial_state(batch_size) for layer in self.attention]


"""
## Train it

The model is compared with two simple forecasts: the last value, and the value of a week
ago.
"""

model = Forecaster()
steps = EPOCHS * -(-TRAINING_SERIES // 16)
schedule = keras.optimizers.schedules.CosineDecay(
    0.0, steps, warmup_target=3e-3, warmup_steps=max(1, steps // 20)
)
model.compile(keras.optimizers.Adam(schedule, global_clipnorm=1.0), "mse")
inputs, targets = inputs_and_targets(validation)
model.fit(
    *inputs_and_targets(training),
    validation_data=(inputs, targets),
    batch_size=16,
    epochs=EPOCHS,
    verbose=2,
)

# Compared in the second half, when all forecasts have seen the cycles.
start = LENGTH // 2
targets = targets[:, start:]
forecasts = model.predict(inputs, batch_size=16, verbose=0)
errors = {
    "last value": validation[:, start:-1] - targets,
    "value of a week ago": validation[:, start - 167 : -168] - targets,
    "this model": forecasts[:, start:] - targets,
}
for name, error in errors.items():
    print(f"{name:20} mean squared error {np.mean(error**2):.3f}")

"""
## Read values as they arrive

The stream is four times as long as the training series. Each step reads one value and the
state. The forecast equals that of the whole series, and a step takes about as long at the
end as at the beginning. The steps run one by one, without compilation.
"""

stream, arrived = inputs_and_targets(make_series(1, STREAM_LENGTH + 1, seed=3))
whole = keras.ops.convert_to_numpy(model(stream))

states = model.get_initial_state(batch_size=1)
outputs, times = [], []
for t in range(STREAM_LENGTH):
    begin = time.perf_counter()
    output, states = model(stream[:, t : t + 1], states=states)
    outputs.append(keras.ops.convert_to_numpy(output))
    times.append(time.perf_counter() - begin)
streamed = np.concatenate(outputs, axis=1)

print(f"largest difference to the whole series: {np.abs(streamed - whole).max():.1e}")
eighth = STREAM_LENGTH // 8
for name, part in (("second", times[eighth : 2 * eighth]), ("last", times[-eighth:])):
    print(f"{name:6} eighth of the stream: {1e3 * np.median(part):.2f} ms per value")
numbers = sum(np.prod(tensor.shape) for state in states for tensor in state.values())
print(f"the state holds {numbers:,} numbers")

plt.figure(figsize=(8, 4))
shown = slice(max(0, STREAM_LENGTH - 168), STREAM_LENGTH)
plt.plot(arrived[0, shown], color="grey", label="values")
plt.plot(streamed[0, shown], color="tab:blue", label="forecast, an hour ahead")
plt.xlabel("hour of the last week")
plt.legend()
plt.savefig("time_series_streaming.png", dpi=100, bbox_inches="tight")

"""
![Values of the last week and their forecasts](time_series_streaming.png)

## Conclusion

Any causal layer with a state of constant size can replace `GatedDeltaAttention` here:
[State and streaming](../concepts/streaming.md) lists them. `save` stores the weights. The
states are plain tensors with one row per series, so a server can hold the states of many
series, and process all series with new values in one batch.
"""
