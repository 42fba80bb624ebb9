"""Settings of a comparison: checked once, and serialisable."""

import dataclasses
import importlib.util

from keras_efficient_attn.layers import get_attention
from keras_efficient_attn.layers.attention.registry import parse_attention
from keras_efficient_attn.ops.common.backend import BACKEND
from keras_efficient_attn.ops.common.checks import (
    as_python_numbers,
    check_int,
    check_name,
    check_positive_int,
    check_positive_number,
)

BACKENDS = ("tensorflow", "jax", "torch")
MODES = ("forward", "train", "decode")
DTYPES = ("float32", "bfloat16", "mixed_bfloat16", "float16", "mixed_float16")
SOFTMAX = "softmax"
MATMUL = "matmul"
DEFAULT_LAYERS = (
    SOFTMAX,
    "performer:feature_map=elu",
    "performer:feature_map=favor+",
)
DEFAULT_LENGTHS = (512, 1024, 2048, 4096)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `compare`, checked.

    Raises:
        ValueError: If an argument is invalid; the message names it and its value.
    """

    layers: tuple = DEFAULT_LAYERS
    lengths: tuple = DEFAULT_LENGTHS
    heads: int = 8
    head_dim: int = 64
    batch: int = 1
    dtype: str = "float32"
    mode: str = "forward"
    causal: bool = False
    backend: str | None = None
    repeats: int = 5
    time_limit: float = 60.0
    model: bool = False
    matmul_size: int | None = None
    seed: int = 0

    def __post_init__(self):
        # Through `object`, because the class is frozen.
        fix = object.__setattr__
        for name in ("layers", "lengths"):
            fix(self, name, self._non_empty(name))
        fix(self, "backend", self.backend or BACKEND)
        # A decoder and a language model are causal by definition.
        fix(self, "causal", bool(self.causal or self.model or self.mode == "decode"))
        sizes = ("heads", "head_dim", "batch", "repeats")
        as_python_numbers(self, *sizes, "lengths", "time_limit", "matmul_size", "seed")
        for name in sizes:
            check_positive_int(name, getattr(self, name))
        check_positive_int("matmul_size", self.matmul_size, optional=True)
        for length in self.lengths:
            check_positive_int("lengths", length)
        fix(self, "lengths", tuple(sorted(set(self.lengths))))
        check_name("dtype", self.dtype, DTYPES)
        check_name("mode", self.mode, MODES)
        check_name("backend", self.backend, BACKENDS)
        check_int("seed", self.seed, least=0)
        check_positive_number("time_limit", self.time_limit)
        if self.model and importlib.util.find_spec("keras_hub") is None:
            raise ValueError(
                "`model` needs KerasHub, which is not installed: pip install "
                f"'keras-efficient-attn[hub]'. Received: model={self.model}"
            )
        for identifier in self.layers:
            try:
                get_attention(identifier, num_heads=self.heads, key_dim=self.head_dim)
                _check_module(identifier)
            except (TypeError, ValueError) as error:
                raise ValueError(f"`layers`: {error}") from error
        if len(set(self.layers)) < len(self.layers):
            raise ValueError(
                f"`layers` must differ from each other. Received: layers={self.layers}"
            )

    def task(self, contestant, length):
        """The task of a worker: one contestant at one length, as a dict."""
        names = ("heads", "head_dim", "batch", "dtype", "mode", "causal", "model")
        names += ("matmul_size", "seed")
        shared = {name: getattr(self, name) for name in names}
        # A layer from outside the package: workers import its module.
        module = None
        if contestant in self.layers:
            module = parse_attention(contestant)[0].__module__
        task = {"contestant": contestant, "length": length, "module": module}
        return {**task, **shared}

    def _non_empty(self, name):
        received = getattr(self, name)
        if not isinstance(received, list | tuple) or not received:
            raise ValueError(
                f"`{name}` must be a list with at least one element. Received: "
                f"{name}={received!r}"
            )
        return tuple(received)


def _check_module(identifier):
    layer_class = parse_attention(identifier)[0]
    if layer_class.__module__ == "__main__":
        raise ValueError(
            "a layer must be in a module that the processes that measure it can "
            f"import, and not in the script itself. Received: {identifier!r}, which is "
            f"{layer_class.__name__} of __main__"
        )
