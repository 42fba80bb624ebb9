"""Times whole layers on PyTorch with and without a second form of an operation.

    python -m tools.compare_forms causal_chunks_torch --lengths 2048 8192

A second form stays in the package only where a layer gains a tenth by it. Both sides
run in turn in one process; a row has the medians and their ratio. Measure alone: other
work on the machine changes the ratio.
"""

import argparse
import contextlib
import functools
import os
import statistics
import time

os.environ["KERAS_BACKEND"] = "torch"

import torch

from keras_efficient_attn.layers import get_attention
from keras_efficient_attn.ops.common import block_softmax, chunking, convolution
from keras_efficient_attn.ops.fourier import tiled
from keras_efficient_attn.ops.fourier.kernel import Kernel
from keras_efficient_attn.ops.fourier.kernels import sines
from keras_efficient_attn.ops.linear_attention import causal_chunks, chunked
from keras_efficient_attn.ops.lsh_attention import pairs
from keras_efficient_attn.ops.vq_attention import windowed

NO_FUSED_MODULE = {"fused_module": lambda *args: None}


def portable_chunks():
    """What `ops.linear_attention.chunked` uses without `causal_chunks_torch`."""
    names = {"Chunks": causal_chunks.Chunks, "by_head": chunking.by_head}
    return {chunked: names}


def portable_softmax():
    """What operations use without `fused_softmax_torch`."""
    return dict.fromkeys((block_softmax, windowed, pairs), NO_FUSED_MODULE)


def portable_codes():
    """What `ops.vq_attention.windowed` uses without `blocks_torch`."""
    return {windowed: NO_FUSED_MODULE}


def portable_sines():
    """What `ops.fourier.tiled` uses without `fourier.kernels.torch_eager`."""
    kernel = Kernel(sines.prepare, sines.log_kernel, sines.log_kernel_gradient)
    step = functools.cache(tiled._step.__wrapped__)
    return {tiled: {"_kernel": lambda config: kernel, "_step": step}}


def portable_convolution():
    """What `ops.common.convolution` uses without PyTorch's convolution."""
    return {convolution: {"BACKEND": "portable"}}


# For each form: the portable one in its place, and the layers that use it.
FORMS = {
    "causal_chunks_torch": (portable_chunks, ("linear", "performer")),
    "torch_eager": (portable_sines, ("fourier",)),
    "fused_softmax_torch": (portable_softmax, ("local", "sparse", "vq", "reformer")),
    "blocks_torch": (portable_codes, ("vq",)),
    "convolution": (portable_convolution, ("delta", "gated-delta", "kimi-delta")),
}


@contextlib.contextmanager
def replaced(names_of):
    """Context in which names of modules have other values.

    Args:
        names_of: Dict of modules to dicts of names to values.
    """
    before = {
        module: {name: getattr(module, name) for name in names}
        for module, names in names_of.items()
    }
    try:
        for module, names in names_of.items():
            vars(module).update(names)
        yield
    finally:
        for module, names in before.items():
            vars(module).update(names)


def train(layer, x):
    """Seconds of one training step: a forward and a backward pass."""
    start = time.perf_counter()
    layer(x, x, use_causal_mask=True, training=True).sum().backward()
    return time.perf_counter() - start


def compare(form, name, length, arguments):
    """Medians of the seconds with the form, and with the portable one."""
    layer = get_attention(name, num_heads=4, key_dim=64)
    x = torch.randn(1, length, 256, requires_grad=True)
    portable = FORMS[form][0]()
    seconds = {True: [], False: []}
    # The first pair includes what is made once.
    for repeat in range(arguments.repeats + 1):
        for special in (True, False):
            context = contextlib.nullcontext() if special else replaced(portable)
            with context:
                taken = train(layer, x)
            if repeat:
                seconds[special].append(taken)
    return [statistics.median(seconds[special]) for special in (True, False)]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("form", choices=FORMS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args(argv)
    print(f"{'layer':<12}{'length':>8}{'with, ms':>12}{'without, ms':>13}{'ratio':>8}")
    for name in FORMS[arguments.form][1]:
        for length in arguments.lengths:
            own, portable = compare(arguments.form, name, length, arguments)
            numbers = f"{1e3 * own:>12.1f}{1e3 * portable:>13.1f}"
            print(f"{name:<12}{length:>8}{numbers}{own / portable:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
