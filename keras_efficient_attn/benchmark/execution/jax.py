"""JAX: XLA compiles ahead of the call and reports what it allocates."""

import jax
import jax.numpy as jnp
import keras

from keras_efficient_attn.benchmark.execution import is_float


class Program:
    """See `keras_efficient_attn.benchmark.execution`."""

    execution = "XLA"

    def __init__(
        self, function, trainable=(), fixed=(), gradients=False, optimizer=None
    ):
        self._function = function
        self._trainable, self._fixed = list(trainable), list(fixed)
        self._optimizer = optimizer
        self._slots = [] if optimizer is None else optimizer.variables
        # The variables that a call assigns.
        self._assigned = [] if not gradients else self._fixed
        if optimizer is not None:
            self._assigned = self._trainable + self._fixed + self._slots
        self._jitted = jax.jit(self._differentiate if gradients else self._forward)
        # Compiled programs by the shapes and types of inputs; the last one called.
        self._programs, self._compiled = {}, None

    def __call__(self, *inputs):
        arguments = self._arguments(inputs)
        leaves, structure = jax.tree.flatten(inputs)
        key = structure, *((jnp.shape(x), jnp.result_type(x)) for x in leaves)
        if key not in self._programs:
            self._programs[key] = self._jitted.lower(*arguments).compile()
        self._compiled = self._programs[key]
        outputs, updated = self._compiled(*arguments)
        for variable, value in zip(self._assigned, updated, strict=True):
            variable.assign(value)
        return outputs

    def compile_for(self, sharding_of, inputs):
        """The program compiled for devices, which need not be present.

        Args:
            sharding_of: The `jax.sharding.Sharding` of a variable or an input.
            inputs: As for a call.
        """

        def describe(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(x))

        described = jax.tree.map(describe, (*self._variables, *inputs))
        return self._jitted.lower(*described).compile()

    @property
    def temporary_bytes(self):
        """Bytes that the last program called allocates beside inputs and outputs."""
        return int(self._compiled.memory_analysis().temp_size_in_bytes)

    @property
    def total_bytes(self):
        """Bytes that the last program called occupies on the device while it runs."""
        analysis = self._compiled.memory_analysis()
        return int(
            analysis.temp_size_in_bytes
            + analysis.argument_size_in_bytes
            + analysis.output_size_in_bytes
            - analysis.alias_size_in_bytes
        )

    @property
    def _variables(self):
        return self._trainable, self._fixed, self._slots

    def _arguments(self, inputs):
        return (*([v.value for v in group] for group in self._variables), *inputs)

    def _forward(self, trainable, fixed, slots, *inputs):
        return self._stateless(trainable, fixed, inputs)[0], []

    def _differentiate(self, trainable, fixed, slots, cotangent, *inputs):
        floats = [x for x in inputs if is_float(x)]

        def run(trainable, floats):
            remaining = iter(floats)
            merged = [next(remaining) if is_float(x) else x for x in inputs]
            return self._stateless(trainable, fixed, merged)

        output, pull, updated = jax.vjp(run, trainable, floats, has_aux=True)
        grad_weights, grad_inputs = pull(cotangent)
        if self._optimizer is None:
            return [output, *grad_inputs, *grad_weights], updated
        trainable, slots = self._optimizer.stateless_apply(
            slots, grad_weights, trainable
        )
        return [output, *grad_inputs], [*trainable, *updated, *slots]

    def _stateless(self, trainable, fixed, inputs):
        variables = self._trainable + self._fixed
        values = zip(variables, [*trainable, *fixed], strict=True)
        with keras.StatelessScope(state_mapping=list(values)) as scope:
            outputs = self._function(*inputs)
        return outputs, [scope.get_current_value(v) for v in self._fixed]


def wait(outputs):
    jax.block_until_ready(outputs)


def peak_memory(program, inputs):
    if jax.default_backend() == "cpu":
        return program.temporary_bytes, "XLA temporaries"
    return program.total_bytes, "device"


def device():
    first = jax.devices()[0]
    return f"{first.platform}: {first.device_kind}"
