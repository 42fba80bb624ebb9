"""The peers as PyTorch modules with the projections of an attention layer."""

import importlib
import math

import numpy as np
import torch
from keras import ops

from keras_efficient_attn.benchmark.peers import PEERS
from keras_efficient_attn.ops.linear_attention.api import linear_attention

WINDOW = 128
BUCKET = 64
HASHES = 4
CHECKED_LENGTH = 2 * WINDOW


class PeerAttention(torch.nn.Module):
    """Query, key, value and output projections around a peer's attention.

    Args:
        name: A name in `PEERS`.
        heads: Number of heads.
        head_dim: Size of a head.
        causal: Whether query `t` sees keys `0..t` only.

    Raises:
        ValueError: If the peer does not support the options or this device.
    """

    def __init__(self, name, heads, head_dim, causal):
        super().__init__()
        module = importlib.import_module(PEERS[name])
        self.core = _CORES[name](module, head_dim, causal)
        self.heads = heads
        width = heads * head_dim
        self.query, self.value, self.output = (
            torch.nn.Linear(width, width) for _ in range(3)
        )
        # Reformer has one projection for queries and keys.
        self.key = self.query if self.core.shared else torch.nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape

        def split(projected):
            return projected.view(batch, length, self.heads, -1).transpose(1, 2)

        query = split(self.query(x))
        key = query if self.core.shared else split(self.key(x))
        heads = self.core(query, key, split(self.value(x)))
        return self.output(heads.transpose(1, 2).reshape(batch, length, width))

    def difference(self, rng):
        """Relative difference of the peer's output from its definition.

        Returns:
            A float; `None` if this module has no definition of the peer.
        """
        if self.core.shared:
            return None
        weight = self.query.weight
        shape = (1, self.heads, CHECKED_LENGTH, weight.shape[0] // self.heads)
        query, key, value = (
            torch.as_tensor(
                rng.standard_normal(shape), dtype=torch.float32, device=weight.device
            )
            for _ in range(3)
        )
        with torch.no_grad():
            output = self.core.float()(query, key, value).cpu().numpy()
            expected = self.core.expected(query, key, value)
        self.core.to(weight.dtype)
        distance = np.linalg.norm(output - expected)
        return float(distance / np.linalg.norm(expected))


class _Core(torch.nn.Module):
    """A peer's attention over `(batch, heads, length, head_dim)`."""

    shared = False

    def __init__(self, attention, causal):
        super().__init__()
        self.attention, self.causal = attention, causal

    def forward(self, query, key, value):
        return self.attention(query, key, value)


class _Performer(_Core):
    """FAVOR+, with the package's default number of features.

    The expected output is this package's linear attention over the peer's own features:
    the peer adds 1e-4 to each feature, so that they differ from FAVOR+'s. If causal,
    the peer also adds 1e-6 to the sums of keys, a percent of the small sums.
    """

    def __init__(self, module, head_dim, causal):
        super().__init__(module.FastAttention(head_dim, causal=causal), causal)
        # The submodule and the package have the same name.
        self.features = module.performer_pytorch.softmax_kernel

    def expected(self, query, key, value):
        query, key = (
            self.features(
                x,
                projection_matrix=self.attention.projection_matrix,
                is_query=is_query,
            ).transpose(1, 2)
            for x, is_query in ((query, True), (key, False))
        )
        return _linear(query, key, value, self.causal)


class _Local(_Core):
    """Blocks of 128 that attend to themselves and their neighbours."""

    def __init__(self, module, head_dim, causal):
        attention = module.LocalAttention(
            window_size=WINDOW, causal=causal, use_rotary_pos_emb=False
        )
        super().__init__(attention, causal)

    def expected(self, query, key, value):
        query, key, value = (x.cpu().numpy() for x in (query, key, value))
        position = np.arange(query.shape[2])
        seen = abs(position[:, None] // WINDOW - position // WINDOW) <= 1
        if self.causal:
            seen &= position <= position[:, None]
        scores = query @ np.swapaxes(key, 2, 3) / math.sqrt(query.shape[3])
        weights = np.exp(scores - scores.max(-1, keepdims=True)) * seen
        return weights / weights.sum(-1, keepdims=True) @ value


class _Reformer(_Core):
    """Hashing with 4 rounds and buckets of 64."""

    shared = True

    def __init__(self, module, head_dim, causal):
        attention = module.LSHAttention(
            bucket_size=BUCKET, n_hashes=HASHES, causal=causal
        )
        super().__init__(attention, causal)

    def forward(self, query, key, value):
        def merge(x):
            return x.reshape(-1, *x.shape[2:])

        return self.attention(merge(query), merge(value))[0].view(value.shape)


class _FlashLinear(_Core):
    """Chunked linear attention with elu + 1, causal."""

    def __init__(self, module, head_dim, causal):
        if not torch.cuda.is_available():
            raise ValueError("flash-linear-attention needs a CUDA device")
        if not causal:
            raise ValueError("flash-linear-attention is causal only")
        ops_module = importlib.import_module("fla.ops.linear_attn")
        super().__init__(None, causal)
        self.chunked = ops_module.chunk_linear_attn

    def forward(self, query, key, value):
        query, key = (torch.nn.functional.elu(x) + 1 for x in (query, key))
        query, key, value = (
            x.transpose(1, 2).contiguous() for x in (query, key, value)
        )
        output, _ = self.chunked(query, key, value, scale=1.0, normalize=True)
        return output.transpose(1, 2)

    def expected(self, query, key, value):
        features = [
            (torch.nn.functional.elu(x) + 1).transpose(1, 2) for x in (query, key)
        ]
        return _linear(*features, value, True)


def _linear(query, key, value, causal):
    """This package's linear attention of features, as `(batch, heads, ...)`."""
    output = linear_attention(query, key, value.transpose(1, 2), causal=causal)
    return ops.convert_to_numpy(output).swapaxes(1, 2)


_CORES = {
    "performer-pytorch": _Performer,
    "local-attention": _Local,
    "reformer-pytorch": _Reformer,
    "flash-linear-attention": _FlashLinear,
}
