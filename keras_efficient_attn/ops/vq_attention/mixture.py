"""Soft codes of keys, which relate Performer's features to Gaussian mixtures."""

from keras import ops

from keras_efficient_attn.ops.common.numerics import accumulator_dtype, max_along
from keras_efficient_attn.ops.vq_attention.codebook import log_joint
from keras_efficient_attn.ops.vq_attention.tensors import make_codebook


def soft_codes(key, codebook, sigma=None, log_weights=None):
    """The share of each code in each key, and a key's log mass.

    ```
    joint[c] = −‖key − code[c]‖² / 2σ[c]² − dim log σ[c] + log_weight[c]
    share    = softmax(joint)                     Σ_c share[c] = 1
    log_mass = log Σ_c exp(joint[c])
    ```

    With `normalize=True`, linear attention with the features `exp(q·code)` of queries
    and `share` of keys is `ops.vq_attention` with soft codes and no window.

    Performer's positive features of keys are soft codes too. For projections `ω`, with
    `codebook = ω`, σ = 1 and `log_weights = ‖ω‖² / 2`,

    ```
    exp(ω·key − ‖key‖² / 2) = exp(log_mass) share
    ```

    is an identity: a mixture of Gaussians around `ω` that weigh `exp(‖ω‖² / 2)`. They
    differ in the factor `exp(log_mass)` of each key, which soft codes omit, and in the
    origin of the codes: `ω` is drawn independently of the keys. With projections of one
    norm, all codes have equal weights.

    Args:
        key: `(batch, length, heads, dim)`.
        codebook: `(heads, codes, dim)`.
        sigma: `(heads,)` or `(heads, codes)`, positive. Defaults to `None`: 1.
        log_weights: `(heads, codes)`, logarithms up to a constant. Defaults to `None`:
            equal weights.

    Returns:
        `(share, log_mass)`: `(batch, length, heads, codes)` and
        `(batch, length, heads)`, float32 or wider.

    Raises:
        ValueError: If shapes do not agree, or a `sigma` is not positive.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import ops
    >>> key = keras.random.normal((1, 100, 4, 32))
    >>> projections = keras.random.normal((4, 64, 32))
    >>> norms = keras.ops.sum(projections**2, axis=-1)
    >>> share, log_mass = ops.soft_codes(key, projections, log_weights=norms / 2)
    >>> features = keras.ops.exp(log_mass)[..., None] * share

    Reference:
        - [Su, 2023](https://kexue.fm/archives/9862), soft codes and Performer
        - [Choromanski et al., 2021](https://arxiv.org/abs/2009.14794), Performer
    """
    key = ops.convert_to_tensor(key)
    codebook = ops.convert_to_tensor(codebook)
    if len(key.shape) != 4 or len(codebook.shape) != 3:
        raise ValueError(
            "`key` must be (batch, length, heads, dim) and `codebook` (heads, codes, "
            f"dim). Received: key.shape={tuple(key.shape)}, "
            f"codebook.shape={tuple(codebook.shape)}"
        )
    if tuple(key.shape[2:]) != (codebook.shape[0], codebook.shape[2]):
        raise ValueError(
            "`codebook` must have heads and dim of `key`. Received: "
            f"codebook.shape={tuple(codebook.shape)}, key.shape={tuple(key.shape)}"
        )
    dtype = accumulator_dtype(key, codebook)
    if sigma is None:
        sigma = ops.ones(codebook.shape[:1], dtype)
    mixture = make_codebook(codebook, sigma, log_weights)
    mixture = [None if t is None else ops.cast(t, dtype) for t in mixture]
    by_head = ops.swapaxes(ops.cast(key, dtype), 1, 2)[:, :, None]
    joint = ops.swapaxes(log_joint(by_head, *mixture)[:, :, 0], 1, 2)
    largest = ops.stop_gradient(max_along(joint, axis=-1, keepdims=True))
    weights = ops.exp(joint - largest)
    mass = ops.sum(weights, axis=-1, keepdims=True)
    return weights / mass, ops.squeeze(ops.log(mass) + largest, axis=-1)
