"""Public packages as attention layers, which the benchmark command compares.

    python -m keras_efficient_attn.benchmark --backend torch --import tools.peers \\
        --causal --layers softmax performer performer-pytorch local local-attention

It runs in the root of a checkout. Each layer has the projections and the call of this
project's layers around the package's attention, so that its attention is all that
differs. The packages run on PyTorch, and a layer of one that is not installed says so.
Their attention takes whole sequences without masks, states or dropout.
"""

import importlib
import importlib.util

from keras_efficient_attn import EfficientAttention, ReformerLSHAttention
from keras_efficient_attn.layers import register_attention
from keras_efficient_attn.ops.common.backend import BACKEND

WINDOW = 128


class PeerAttention(EfficientAttention):
    """The attention of a public package. Subclasses name it and implement `make`.

    Attributes:
        package: Name on the package index.
        module: Name to import.

    Raises:
        ValueError: If the package is not installed, or Keras is not on PyTorch.
    """

    package = module = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if importlib.util.find_spec(self.module) is None:
            raise ValueError(
                f"{self.package} is not installed: pip install {self.package}"
            )
        if self._dropout:
            raise ValueError(
                f"{self.package} has no dropout here. Received: dropout={self._dropout}"
            )
        self._made = {}

    def build(self, query_shape, value_shape, key_shape=None):
        if BACKEND != "torch":
            raise ValueError(
                f"{self.package} needs PyTorch. Received: Keras' backend is {BACKEND}"
            )
        super().build(query_shape, value_shape, key_shape)

    def make(self, module, causal):
        """The package's attention.

        Args:
            module: The imported module.
            causal: Whether query `t` sees keys `0..t` only.

        Returns:
            `torch.nn.Module` of query, key and value, `(batch, heads, length,
            head_dim)` each.
        """
        raise NotImplementedError

    def attend(self, query, key, value, call):
        given = call.query_mask, call.key_mask, call.state
        if call.scores or any(argument is not None for argument in given):
            raise ValueError(f"{self.package} has no masks, states or scores here.")
        attention = self.package_attention(call.causal).to(query.device, query.dtype)
        heads = attention(*(x.transpose(1, 2) for x in (query, key, value)))
        return heads.transpose(1, 2), None

    def package_attention(self, causal):
        """The `torch.nn.Module` that `make` returns, made once, with its features."""
        if causal not in self._made:
            self._made[causal] = self.make(importlib.import_module(self.module), causal)
        return self._made[causal]


@register_attention("performer-pytorch")
class PerformerPeer(PeerAttention):
    """FAVOR+, with the package's default number of features."""

    package, module = "performer-pytorch", "performer_pytorch"

    def make(self, module, causal):
        return module.FastAttention(self.key_dim, causal=causal)


@register_attention("local-attention")
class LocalPeer(PeerAttention):
    """Blocks of 128 that attend to themselves and their neighbours."""

    package, module = "local-attention", "local_attention"

    def make(self, module, causal):
        return module.LocalAttention(
            window_size=WINDOW, causal=causal, use_rotary_pos_emb=False
        )


@register_attention("reformer-pytorch")
class ReformerPeer(PeerAttention, ReformerLSHAttention):
    """Hashing, with one projection for queries and keys.

    Of this project's layer it has the projections, `bucket_size` and `num_hashes`.
    """

    package, module = "reformer-pytorch", "reformer_pytorch"

    def make(self, module, causal):
        import torch

        class Attention(torch.nn.Module):
            """Joins heads and batch, as the package's attention takes them."""

            def __init__(self, attention):
                super().__init__()
                self.attention = attention

            def forward(self, query, key, value):
                query, flat = (x.reshape(-1, *x.shape[2:]) for x in (query, value))
                return self.attention(query, flat)[0].view(value.shape)

        return Attention(
            module.LSHAttention(
                bucket_size=self.bucket_size, n_hashes=self.num_hashes, causal=causal
            )
        )

    def state_spec(self, batch_size, max_length):
        return None

    @property
    def estimates_softmax(self):
        return False

    def operations(self, length, causal):
        return None


@register_attention("flash-linear-attention")
class FlashLinearPeer(PeerAttention):
    """Chunked linear attention with elu + 1, causal, on CUDA devices."""

    package, module = "flash-linear-attention", "fla"

    def make(self, module, causal):
        import torch

        if not torch.cuda.is_available():
            raise ValueError(f"{self.package} needs a CUDA device")
        if not causal:
            raise ValueError(f"{self.package} is causal only")
        chunked = importlib.import_module("fla.ops.linear_attn").chunk_linear_attn

        class Attention(torch.nn.Module):
            """The features, and axes in the package's order."""

            def forward(self, query, key, value):
                query, key = (torch.nn.functional.elu(x) + 1 for x in (query, key))
                query, key, value = (
                    x.transpose(1, 2).contiguous() for x in (query, key, value)
                )
                output, _ = chunked(query, key, value, scale=1.0, normalize=True)
                return output.transpose(1, 2)

        return Attention()
