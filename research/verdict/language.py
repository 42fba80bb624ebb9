"""Causal models of bytes, tested beyond the length of their training."""

from byte_lm.data import batches, load_splits
from byte_lm.model import trained_parameters
from claims.byte_models import bits_per_byte
from keras_efficient_attn.models import EfficientCausalLM
from verdict.models import backbone, fit

SIZES = {
    "layers": 2,
    "heads": 4,
    "dim": 128,
    "steps": 1000,
    "batch": 2,
    "learning_rate": 2e-3,
    "length": 1024,
    # Of training, and of the windows of test text. The same bytes count at all lengths:
    # the last of each window.
    "lengths": [1024, 4096, 16384],
    "scored": 512,
    "windows": 16,
    # The standard library's source by default; the windows are spread evenly.
    "text": None,
}


def options(candidate, convolution):
    """Options of the backbone."""
    return candidate.options(convolution)


def measure(options, seed, sizes):
    """Bits per byte by the length of the windows, and the parameters."""
    splits = load_splits(sizes["text"])
    model = EfficientCausalLM(backbone(options, sizes, 256, "decoder", seed))
    text = splits["train"]
    fit(model, batches(text, sizes["length"], sizes["batch"], seed), sizes)
    bits = {
        str(length): bits_per_byte(
            model,
            splits["test"],
            length,
            sizes["scored"],
            sizes["windows"],
            max(sizes["lengths"]),
        )
        for length in sizes["lengths"]
    }
    return {"bits_per_byte": bits, "parameters": trained_parameters(model)}
