"""How many functions and files of the package a call passes.

Counted by `sys.setprofile` in an eager causal call of a built layer, 256 positions, 2
heads of 32; on JAX, in the call that traces the compiled parts. `-s` prints the counts.
"""

import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_efficient_attn
from keras_efficient_attn.layers import get_attention

if keras.backend.backend() == "tensorflow":
    pytest.skip("counted on PyTorch and JAX", allow_module_level=True)

PACKAGE = str(Path(keras_efficient_attn.__file__).parent)
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}
# Functions, files and the depth of the stack; more where a layer has more to do.
MOST = (60, 16, 14)
MORE = {
    ("torch", "vq"): (66, 17, 13),
    ("jax", "vq"): (78, 17, 18),
}


def count_path(call):
    """`(functions, files, depth)` of the package in a call."""
    functions, stack, deepest = set(), [], 0

    def record(frame, event, _):
        nonlocal deepest
        code = frame.f_code
        inside = code.co_filename.startswith(PACKAGE)
        if not inside or code.co_name in COMPREHENSIONS:
            return
        if event == "call":
            stack.append(code)
            functions.add(code)
            deepest = max(deepest, len(stack))
        elif event == "return" and stack:
            stack.pop()

    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(functions), len({code.co_filename for code in functions}), deepest


@pytest.mark.parametrize(
    "name", ["linear", "performer", "gated-delta", "local", "sparse", "vq"]
)
def test_a_call_is_short(name):
    layer = get_attention(name, num_heads=2, key_dim=32)
    x = np.random.default_rng(0).normal(size=(1, 256, 64)).astype("float32")
    x = keras.ops.convert_to_tensor(x)

    def call():
        layer(x, x, use_causal_mask=True)

    # What a layer keeps for later calls is made in the first.
    call()
    if keras.backend.backend() == "jax":
        import jax

        jax.clear_caches()
    counts = count_path(call)
    print(f"{name}: {counts[0]} functions in {counts[1]} files, {counts[2]} deep")
    most = MORE.get((keras.backend.backend(), name), MOST)
    assert all(count <= limit for count, limit in zip(counts, most, strict=True))
