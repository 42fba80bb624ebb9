"""The kind of device that JAX computes on."""

import jax


def device_kind():
    return jax.default_backend()
