"""Attention over sequences that are split across devices."""

import contextlib

from keras import ops

from keras_efficient_attn.distribution import linear, windows
from keras_efficient_attn.ops.common.backend import BACKEND, backend_module
from keras_efficient_attn.ops.common.checks import (
    check_float_dtype,
    check_heads,
    check_positive_int,
)
from keras_efficient_attn.ops.common.feature_kernels.choice import features_config
from keras_efficient_attn.ops.common.inputs import boolean_mask
from keras_efficient_attn.ops.linear_attention.api import check_key_log_weight
from keras_efficient_attn.ops.linear_attention.gated.api import check_rates
from keras_efficient_attn.ops.vq_attention.codebook import nearest_codes
from keras_efficient_attn.ops.vq_attention.config import (
    Keys,
    VQConfig,
    check_codebook,
    make_codebook,
    map_tensors,
)

# The scopes that are active; layers split their sequences by the last. A list, because
# `torch.compile` traces no context variables.
ACTIVE = []


class SequenceParallel:
    """Splits the positions of sequences over devices and attends across them.

    ```
    S_own  = Σ φ(k[s])ᵀ v[s]                over the positions of a device
    S      = Σ S_own of the devices before, after one all-gather
    head[t] = as on one device, from the state S
    ```

    Each device attends to its own positions, starting from the state of the devices
    before it. Devices exchange states and the last keys of a window, so the number of
    bytes does not depend on the length. For a state that decays or is corrected
    (`log_decay`, `beta`) they also exchange the matrix by which a device's positions
    multiply the state before them.

    On JAX, tensors are whole arrays, and `jax.shard_map` runs over one axis of a mesh;
    the compiler splits batches and heads over other axes. On PyTorch, every process
    calls with its own positions, which follow those of the process before it in the
    group. Gradients equal the gradients on one device. On PyTorch, each process has its
    share of the weights' gradients, to be summed up.

    Args:
        device_mesh: On JAX, a `keras.distribution.DeviceMesh`. Defaults to `None`: the
            mesh of the current `keras.distribution`.
        axis_name: On JAX, the mesh's axis for positions. Defaults to `"sequence"`.
        group: On PyTorch, a group of processes. Defaults to `None`: all of them.

    Raises:
        ValueError: On TensorFlow; for an axis that the mesh lacks; if PyTorch has no
            process group; in a process outside of `group`; or for an argument of
            another backend.
        TypeError: If `device_mesh` is not a mesh.

    Example:

    ```python
    mesh = keras.distribution.DeviceMesh((1, 8), ("batch", "sequence"))
    split = keras_efficient_attn.distribution.SequenceParallel(mesh)
    features = keras.ops.elu(x) + 1
    y = split.linear_attention(features, features, x, causal=True)
    ```

    With layers, in `fit` too:

    ```python
    with split.scope():
        model.fit(tokens, targets)
    ```

    Reference:
        - [Sun et al., 2025](https://arxiv.org/abs/2502.07563), LASP-2
    """

    def __init__(self, device_mesh=None, axis_name="sequence", group=None):
        if BACKEND == "tensorflow":
            raise ValueError(
                "`SequenceParallel` needs the Keras backend 'jax' or 'torch'. "
                "Received: keras.backend.backend()='tensorflow'"
            )
        devices = backend_module("keras_efficient_attn.distribution.devices")
        self._runner = devices.Runner(device_mesh, axis_name, group)

    @property
    def num_devices(self):
        """Devices that share a sequence."""
        return self._runner.size

    @contextlib.contextmanager
    def scope(self):
        """Context in which layers split the sequences that they attend to, on JAX.

        The layers are `LinearAttention` and its subclasses, including
        `PerformerAttention` and the layers with decays and delta rules;
        `LocalAttention` with a `window` and without dropout on its weights; and
        `VQAttention`: in self-attention without a `state`. Codes, and a `window` beside
        features, have to be causal. The compiler splits all other computations.

        Pad rows on the right: masked positions keep their places, because the others
        would have to move from device to device.

        A function that is compiled within the scope stays split.

        Raises:
            ValueError: On PyTorch, where a layer does not know which positions it has.
        """
        if not self._runner.divides_tensors:
            raise ValueError(
                "`scope` works on JAX only: on PyTorch call the operations of "
                "`SequenceParallel` with the positions of each process. Received: "
                f"keras.backend.backend()={BACKEND!r}"
            )
        ACTIVE.append(self)
        try:
            yield self
        finally:
            ACTIVE.pop()

    def linear_attention(
        self,
        query_features,
        key_features,
        value,
        *,
        key_mask=None,
        key_log_weight=None,
        log_decay=None,
        beta=None,
        causal: bool = False,
        normalize: bool = True,
        chunk_size: int | None = None,
    ):
        """`keras_efficient_attn.ops.linear_attention` over several devices.

        Args:
            query_features, key_features, value: As for the operation, with as many
                queries as keys.
            key_mask, key_log_weight, log_decay, beta: As for the operation.
            causal, normalize, chunk_size: As for the operation.

        Returns:
            `(batch, length, heads, value_dim)` in the dtype of `value`.

        Raises:
            ValueError: If shapes do not agree, or the devices do not divide the
                length.
        """
        tensors = _as_tensors(query_features, key_features, value)
        _, key_features, value = tensors
        key_log_weight, *rates = _as_tensors(key_log_weight, log_decay, beta)
        key_mask = boolean_mask(key_mask)
        check_heads(*tensors, key_mask, names=("query_features", "key_features"))
        check_key_log_weight(key_log_weight, key_features)
        check_float_dtype("value", value)
        config = features_config(
            key_features.shape[-1],
            causal=causal,
            normalize=normalize,
            chunk_size=chunk_size,
        )
        if any(rate is not None for rate in rates):
            check_rates(*rates, key_features, config.causal, key_log_weight)
            split = *tensors, key_mask, rates
            output = self.run(linear.gated_attention, split, (), config)
        else:
            split = *tensors, key_mask, key_log_weight
            output = self.run(linear.linear_attention, split, (), config)
        return ops.cast(output, value.dtype)

    def local_attention(
        self,
        query,
        key,
        value,
        *,
        window,
        causal: bool = False,
        key_mask=None,
        scale: float | None = None,
    ):
        """`keras_efficient_attn.ops.local_attention` over several devices.

        Args:
            query, key, value, window, causal, key_mask, scale: As for the operation,
                with as many queries as keys, and at least `window - 1` positions on
                each device.

        Returns:
            `(batch, length, heads, value_dim)` in the dtype of `value`.

        Raises:
            ValueError: As `linear_attention`, and for a `window` that reaches beyond
                the next device.
        """
        check_positive_int("window", window)
        split = *_as_tensors(query, key, value), boolean_mask(key_mask)
        check_heads(*split)
        self.check_window(split[0], window - 1)
        return self.run(windows.local_attention, split, (), window, causal, scale)

    def vq_attention(
        self,
        query,
        key,
        value,
        codebook,
        *,
        key_mask=None,
        sigma=None,
        log_weights=None,
        order: int = 0,
        rank: int | None = None,
        window: int | None = None,
        quantize_window: bool = False,
        gradient_through_cache: bool = True,
    ):
        """Causal `keras_efficient_attn.ops.vq_attention` over several devices.

        Args:
            query, key, value: As for the operation, with as many queries as keys, and
                at least `window` positions on each device.
            codebook, key_mask, sigma, log_weights, order, rank: As for the operation.
            window, quantize_window, gradient_through_cache: As for the operation.

        Returns:
            `(batch, length, heads, value_dim)` in the dtype of `value`.

        Raises:
            ValueError: As `local_attention`, and for a codebook that does not fit.
        """
        query, key, value, codebook = _as_tensors(query, key, value, codebook)
        key_mask = boolean_mask(key_mask)
        check_heads(query, key, value, key_mask)
        check_codebook(query, codebook)
        config = VQConfig(
            soft=sigma is not None,
            order=order,
            rank=rank,
            window=window,
            quantize_window=quantize_window,
            gradient_through_cache=gradient_through_cache,
        )
        config.check_key_dim(query.shape[-1])
        self.check_window(query, config.window)
        index = None if config.soft else nearest_codes(key, codebook)
        keys = Keys(key, value, key_mask, index)
        whole = make_codebook(codebook, sigma, log_weights), None
        output = self.run(windows.vq_attention, (query, keys, None), whole, config)
        return ops.cast(output, value.dtype)

    def run(self, function, split, whole, *static):
        """`function(devices, split, whole, *static)` on each device: for layers.

        Args:
            function: A function of this package.
            split: Nest of tensors `(batch, length, ...)`; query and key come first.
            whole: Nest of tensors that every device has.
            *static: Hashable arguments.
        """
        lengths = split[0].shape[1], _key_of(split).shape[1]
        if len(set(lengths)) > 1:
            raise ValueError(
                "With `SequenceParallel`, queries and keys must have the same length. "
                f"Received: query length {lengths[0]}, key length {lengths[1]}"
            )
        if self._runner.divides_tensors and lengths[0] % self.num_devices:
            raise ValueError(
                "The sequence length must be a multiple of the number of devices of "
                f"`SequenceParallel`. Received: length {lengths[0]}, "
                f"{self.num_devices} devices"
            )
        return self._runner.run(function, split, whole, *static)

    def check_window(self, query, reach):
        """Raises `ValueError` for a window beyond the neighbour's positions.

        Args:
            query: `(batch, length, ...)`.
            reach: Number of keys before a query that it sees, or `None` for none.
        """
        length = query.shape[1]
        if self._runner.divides_tensors:
            length //= self.num_devices
        if reach is not None and reach > length:
            raise ValueError(
                "`window` must not reach beyond the positions of the previous device: "
                "use a smaller window, longer sequences or fewer devices. Received: a "
                f"reach of {reach}, with {length} positions per device"
            )


def check_split_is_causal(causal):
    """Raises `ValueError` for a layer that can be split only with a causal mask."""
    if not causal:
        raise ValueError(
            "In the scope of `SequenceParallel`, `VQAttention` and linear attention "
            "with a `window` must be causal: pass use_causal_mask=True. Received: "
            "use_causal_mask=False"
        )


def _as_tensors(*arrays):
    """Tensors, of arrays that may be `None`."""
    return map_tensors(ops.convert_to_tensor, arrays)


def _key_of(split):
    return split[1].key if isinstance(split[1], Keys) else split[1]
