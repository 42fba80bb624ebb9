"""The base of the layers whose state decays or is corrected."""

import dataclasses
import math

import keras
from keras import ops

from keras_efficient_attn.distribution.linear import gated_attention
from keras_efficient_attn.layers.arguments import activation_of
from keras_efficient_attn.layers.attention.linear.gated.output import (
    OutputGate,
    OutputNorm,
)
from keras_efficient_attn.layers.attention.linear.layer import LinearAttention
from keras_efficient_attn.ops.common.checks import (
    check_int,
    is_number,
    is_positive_int,
)
from keras_efficient_attn.ops.common.convolution import causal_convolution
from keras_efficient_attn.ops.common.inputs import hide_masked
from keras_efficient_attn.ops.common.numerics import (
    accumulator_dtype,
    norm_of_heads,
)
from keras_efficient_attn.ops.linear_attention.gated.api import (
    at_positions,
    gated_attention_with_feature_maps,
)


class GatedStateAttention(LinearAttention):
    """Linear attention whose state decays, or is corrected, from position to position.

    A subclass computes the rates in `_rates` and builds their weights in
    `_build_rates`. The layers are recurrences: query `t` sees keys `0..t`, and a call
    needs `use_causal_mask=True`.

    Args:
        num_heads: Number of heads.
        *args, **kwargs: Further arguments of `LinearAttention`, without `window`.
        num_value_heads: Number of heads of values, states, rates and outputs, a
            multiple of `num_heads`, which is then the number of heads of queries and
            keys: each serves `num_value_heads / num_heads` heads of values, one after
            the other. `layer.num_heads` counts the heads of values. Defaults to `None`:
            `num_heads`. Excludes `num_key_value_heads`.
        feature_map: A map without log scales. Defaults to `"identity"`.
        normalize: Whether to divide by the sum of the weights. Otherwise heads are
            divided by `√key_dim`. Defaults to `False`.
        convolution: Positions that a depthwise causal convolution of projected
            queries, keys and values reaches. Defaults to `None`: no convolution.
        activation: Name of an activation of queries, keys and values after the
            convolution, or a function. Defaults to `None`.
        qk_activation: Activation of queries and keys in its place; `activation` is then
            the values'. `"linear"` for none. Defaults to `None`: `activation`.
        output_norm: `"rms"` or `"group"`: the norm of each head's output; or
            `OutputNorm`. `None` for none. Defaults to `"rms"`.
        output_gate: Name of the activation of a gate that multiplies the heads after
            the norm, or a function, or `OutputGate`. Defaults to `None`: no gate.
    """

    takes_sliding_window = False
    estimates_softmax = False
    refused_arguments = ("window",)

    def __init__(
        self,
        num_heads,
        *args,
        num_value_heads: int | None = None,
        feature_map="identity",
        normalize: bool = False,
        convolution: int | None = None,
        activation=None,
        qk_activation=None,
        output_norm="rms",
        output_gate=None,
        **kwargs,
    ):
        _check_value_heads(num_heads, num_value_heads, kwargs)
        super().__init__(
            num_value_heads or num_heads,
            *args,
            feature_map=feature_map,
            normalize=normalize,
            **kwargs,
        )
        check_int("convolution", convolution, 2, optional=True)
        if not self.feature_map.causal:
            raise ValueError(
                f"{type(self).__name__} needs a causal `feature_map`, such as 'elu'. "
                f"Received: feature_map={self.feature_map.name!r}"
            )
        self.keep(
            dict(
                num_value_heads=num_value_heads,
                normalize=normalize,
                convolution=convolution,
            )
        )
        self._query_key_heads = num_heads
        self.activation = activation_of("activation", activation)
        self.qk_activation = activation_of("qk_activation", qk_activation)
        self.output_norm = self.output_gate = None
        if output_norm is not None:
            self.output_norm = OutputNorm.get("output_norm", output_norm)
        if output_gate is not None:
            self.output_gate = OutputGate.get("output_gate", output_gate)

    @classmethod
    def conversion_refusal(cls, options):
        return "its gates are learned, and the trained model has none."

    def _check_window(self):
        if self.window is not None:
            raise ValueError(
                f"{type(self).__name__} has no `window`: leave it out. Received: "
                f"window={self.window!r}"
            )

    def _check_call(self, query, value, key, call):
        if not call.causal:
            raise ValueError(
                f"{type(self).__name__} is always causal: call it with "
                "use_causal_mask=True, or use another layer in an encoder. Received: "
                "use_causal_mask=False"
            )

    @property
    def _gate_rank(self):
        """Rank of the output gate's projection; `None` for full."""
        return self.output_gate.rank

    @property
    def _key_value_heads(self):
        """Heads of values, and of the rates."""
        return self.num_key_value_heads or self._num_heads

    @property
    def _projected_heads(self):
        if self.num_value_heads is None:
            return super()._projected_heads
        return self._query_key_heads, self._query_key_heads, self._num_heads

    @property
    def _convolved(self):
        """Names and shapes of the heads that convolutions read."""
        dims = self._key_dim, self._key_dim, self._value_dim
        shapes = zip(self._projected_heads, dims, strict=True)
        return dict(zip(("query", "key", "value"), shapes, strict=True))

    def build(self, query_shape, value_shape, key_shape=None):
        super().build(query_shape, value_shape, key_shape)
        key_dim = (value_shape if key_shape is None else key_shape)[-1]
        self._convolution_kernels = {}
        if self.convolution is not None:
            bound = self.convolution**-0.5
            for index, (name, shape) in enumerate(self._convolved.items()):
                self._convolution_kernels[name] = self.add_weight(
                    name=f"{name}_convolution_kernel",
                    shape=(self.convolution, *shape),
                    initializer=keras.initializers.RandomUniform(
                        -bound, bound, seed=self._seed_of(index)
                    ),
                )
        self._norm_scale = None
        if self.output_norm is not None and self.output_norm.scale:
            by_head = (self._num_heads,) if self.output_norm.kind == "group" else ()
            self._norm_scale = self.add_weight(
                name="norm_scale",
                shape=(*by_head, self._value_dim),
                initializer="ones",
            )
        self._output_gate_layers = []
        if self.output_gate is not None:
            self._output_gate_layers = build_projection(
                self,
                "output_gate",
                query_shape[-1],
                (self._num_heads, self._value_dim),
                self._gate_rank,
                use_bias=self.output_gate.bias,
            )
        self._build_rates(key_dim)

    def _build_rates(self, input_dim):
        """Creates the weights of `_rates`, for key inputs of width `input_dim`."""

    def _rates(self, key):
        """`(log_decay, beta)` of the key inputs `(batch, length, input_dim)`.

        Each is `None` or `(batch, length, heads)`; decays may be `(batch, length,
        heads, features)`, or `(heads,)` without gradient. In the accumulator's dtype:
        gates need at least float32.
        """
        raise NotImplementedError

    def _seed_of(self, index):
        """The seed of one random weight, derived from the layer's seed."""
        return None if self.seed is None else self.seed + index

    def state_spec(self, batch_size, max_length):
        spec = super().state_spec(batch_size, max_length)
        if self.convolution is not None:
            rows = batch_size, self.convolution - 1
            for name, heads in self._convolved.items():
                spec[f"{name}_inputs"] = ((*rows, *heads), self.state_dtype)
        return spec

    def _project_inputs(self, query, key, value, call):
        rates = self._rates(key)
        heads = {
            "query": self._query_dense(query),
            "key": self._key_dense(key),
            "value": self._value_dense(value),
        }
        last = {}
        if self.convolution is not None:
            for name, x in heads.items():
                mask = call.query_mask if name == "query" else call.key_mask
                state_name = f"{name}_inputs"
                past = None if call.state is None else call.state[state_name]
                x = x if mask is None else hide_masked(x, mask)
                heads[name], inputs = causal_convolution(
                    x,
                    self._convolution_kernels[name],
                    past,
                    call.lengths,
                    call.documents,
                )
                if past is not None:
                    last[state_name] = ops.cast(inputs, self.state_dtype)
        value_activation, key_activation = (
            self.activation,
            self.qk_activation or self.activation,
        )
        for name, x in heads.items():
            activation = value_activation if name == "value" else key_activation
            if activation is not None:
                # In float32: normalising short vectors gives gradients too large for
                # half precision, which mostly end where an activation is flat.
                x = activation(ops.cast(x, accumulator_dtype(x)))
                if name == "value":
                    # Its dtype is that of a kernel's products.
                    x = ops.cast(x, self.compute_dtype)
            shared = x.shape[2] < self._num_heads
            heads[name] = self._for_query_heads(x) if shared else x
        options = {**call.options, "rates": rates, "last_inputs": last}
        return *heads.values(), dataclasses.replace(call, options=options)

    def attend(self, query, key, value, call):
        tensors, options, position = self._prepare_call(query, key, value, call)
        rates, config = call.options["rates"], self._config(causal=True)
        if call.split is None:
            heads, state = gated_attention_with_feature_maps(
                tensors, rates, config, **options
            )
        else:
            tensors = *tensors, options["key_mask"], at_positions(rates, key)
            weights, state = options["map_weights"], None
            heads = call.split.run(gated_attention, tensors, weights, config)
        if not self.normalize:
            heads = heads * self._key_dim**-0.5
        if state is not None:
            state = {**state, **call.options["last_inputs"]}
        if position is not None:
            state["position"] = position + call.positions_read(query)
        if self._dropout > 0.0:
            heads = self._dropout_layer(heads, training=call.training)
        return heads, state

    def _project(self, heads, gate_input, query_mask):
        if self.output_norm is not None:
            gain = self._norm_scale
            gain = None if gain is None else ops.convert_to_tensor(gain)
            options = self.output_norm.epsilon, self.output_norm.kind == "group"
            heads = norm_of_heads(heads, gain, *options, self.compute_dtype)
        if self.output_gate is not None:
            gate = apply_projections(self._output_gate_layers, gate_input)
            gate = self.output_gate.activation(gate)
            heads = ops.cast(heads, gate.dtype) * gate
        return super()._project(heads, gate_input, query_mask)

    def get_config(self):
        return {
            **super().get_config(),
            "num_heads": self._query_key_heads,
            "activation": _serialize(self.activation),
            "qk_activation": _serialize(self.qk_activation),
            "output_norm": self.output_norm and self.output_norm.get_config(),
            "output_gate": self.output_gate and self.output_gate.get_config(),
        }


def _check_value_heads(num_heads, num_value_heads, others):
    """Raises `ValueError` for a number of value heads that the layer cannot have."""
    if num_value_heads is None:
        return
    shared = others.get("num_key_value_heads")
    if (
        not is_positive_int(num_value_heads)
        or not is_positive_int(num_heads)
        or num_value_heads % num_heads
        or shared is not None
    ):
        raise ValueError(
            "`num_value_heads` must be None or a multiple of `num_heads`, and cannot "
            "be used together with `num_key_value_heads`. Received: "
            f"num_value_heads={num_value_heads!r}, num_heads={num_heads!r}, "
            f"num_key_value_heads={shared!r}"
        )


def _serialize(activation):
    return None if activation is None else keras.activations.serialize(activation)


# The range of the initial step sizes.
STEPS = (1e-3, 0.1)
# Standard deviation of the initial kernels of decays and β. They then begin near what
# their biases say. A Glorot kernel, whose outputs are few heads, would multiply a
# decay's logarithm by 4 and more.
GATE_DEVIATION = 0.02


def build_projection(
    layer, name, input_dim, outputs, rank=None, deviation=None, use_bias=False
):
    """Built projections, one after the other.

    Args:
        layer: The attention layer that will own the projections.
        name: Prefix of their names.
        input_dim: Width of the inputs.
        outputs: Shape of the outputs at a position: `(heads,)` or `(heads, features)`.
        rank: Width between two layers; `None` for one layer.
        deviation: Standard deviation of their kernels at first; `None` for the layer's
            initializer.
        use_bias: Whether the last has a bias.
    """
    shapes = [outputs] if rank is None else [(rank,), outputs]
    layers = []
    for index, shape in enumerate(shapes):
        suffix = "" if index + 1 == len(shapes) else "_low_rank"
        axes = "de"[: len(shape)]
        # Not `Dense`, which casts float64 to float32 on PyTorch.
        dense = keras.layers.EinsumDense(
            f"abc,c{axes}->ab{axes}",
            output_shape=(None, *shape),
            bias_axes=axes if use_bias and not suffix else None,
            kernel_initializer=(
                layer._new_kernel_initializer()
                if deviation is None
                else keras.initializers.RandomNormal(stddev=deviation)
            ),
            kernel_regularizer=layer._kernel_regularizer,
            kernel_constraint=layer._kernel_constraint,
            dtype=layer.dtype_policy,
            name=name + suffix,
        )
        dense.build((None, None, input_dim))
        input_dim = shape[0]
        layers.append(dense)
    return layers


def decay_name(shape):
    """The name of the projection to decays of this shape, by which weights are split.

    Args:
        shape: `(heads,)` or `(heads, features)`.
    """
    return "decay" if len(shape) == 1 else "feature_decay"


def apply_projections(layers, x):
    """`x` through all layers."""
    for layer in layers:
        x = layer(x)
    return x


def check_least_log_decay(value):
    """Raises `ValueError` unless it is a number below 0, or `None`."""
    if value is not None and not (is_number(value) and value < 0):
        raise ValueError(
            "`least_log_decay` must be a number below 0, or None. Received: "
            f"least_log_decay={value!r}"
        )


def log_rates(least, seed):
    """Initializer: logarithms of rates that are uniform from `least` to 16."""
    rates = keras.initializers.RandomUniform(least, 16.0, seed)

    def initialize(shape, dtype=None):
        return ops.log(rates(shape, dtype))

    return initialize


def step_biases(seed):
    """Initializer: biases whose `softplus` is log-uniform in `STEPS`."""
    logarithms = keras.initializers.RandomUniform(*map(math.log, STEPS), seed)

    def initialize(shape, dtype=None):
        return ops.log(ops.expm1(ops.exp(logarithms(shape, dtype))))

    return initialize
