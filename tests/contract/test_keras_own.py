"""Keras' own tests of `MultiHeadAttention` pass with each layer instead.

Keras' wheel includes the test file. `LEFT_OUT` lists the excluded tests, with reasons.
"""

import fnmatch
import types
import unittest

import keras
import pytest
from keras.src.layers.attention import multi_head_attention_test as keras_own

from keras_efficient_attn import LinearAttention
from keras_efficient_attn.layers import attention_names
from keras_efficient_attn.layers.attention.linear.gated.layer import (
    GatedStateAttention,
)
from keras_efficient_attn.layers.attention.registry import attention_class

# Run all on the fastest backend only; other tests cover differences between backends.
ALL = frozenset(attention_names())
DENSE_MASK = "It needs a mask that differs between queries."
FUSED = "It looks into Keras' fused path, or the errors of Keras' flash attention."
WEIGHTS = "It counts weights, and the layer has weights beside its projections."
VALUES = "It compares with the values of softmax attention."
BEYOND = "The layer sees keys beyond a window, or has no window."
NO_WINDOW = "The layer has no window, and refuses `sliding_window`."
SAME_VECTORS = "Queries and keys of the layer are the same vectors."
# Pattern of names of tests: (layers, reason).
LEFT_OUT = {
    "test_masking*": (ALL, DENSE_MASK),
    "test_causal_only_fast_path": (ALL, DENSE_MASK),
    "test_causal_only_with_other_mask*": (ALL, DENSE_MASK),
    "test_causal_only_masks_when_fused*": (ALL, DENSE_MASK),
    "test_correctness*": (ALL - {"fourier", "local", "softmax", "sparse"}, VALUES),
    "test_causal_only_skipped_for_subclass": (ALL, FUSED),
    "test_flash_attention_with_errors": (ALL, FUSED),
    "test_lora": (ALL - {"local", "softmax", "sparse"}, WEIGHTS),
    "test_sliding_window": (ALL - {"local", "softmax"}, BEYOND),
    "test_sliding_window_serialization": (
        ALL - {"local", "performer", "softmax", "vq"},
        NO_WINDOW,
    ),
    "test_initializer": ({"reformer"}, SAME_VECTORS),
    "test_basics*": ({"reformer"}, SAME_VECTORS),
    "test_high_dim_attention*": ({"reformer"}, SAME_VECTORS),
    "test_compute_output_shape*": ({"reformer"}, SAME_VECTORS),
    "test_query_mask_propagation": ({"reformer"}, SAME_VECTORS),
    "test_no_warning_with_keras_mask": ({"reformer"}, SAME_VECTORS),
    "test_multi_head_attention_output_shape*": ({"reformer"}, SAME_VECTORS),
    "test_quantize_int8": ({"reformer"}, SAME_VECTORS),
    "test_symbolic_return_attention_scores*": ({"reformer"}, SAME_VECTORS),
}
LAYERS = sorted(ALL) if keras.backend.backend() == "torch" else ["softmax"]


def test_what_is_left_out_exists():
    known = {name for name in dir(keras_own.MultiHeadAttentionTest) if "test" in name}
    for pattern, (layers, _) in LEFT_OUT.items():
        assert fnmatch.filter(known, pattern), pattern
        assert layers <= ALL


def own_tests():
    loader = unittest.TestLoader()
    for name in loader.getTestCaseNames(keras_own.MultiHeadAttentionTest):
        for layer in LAYERS:
            left_out = any(
                fnmatch.fnmatch(name, pattern) and layer in layers
                for pattern, (layers, _) in LEFT_OUT.items()
            )
            if not left_out:
                yield pytest.param(layer, name, id=f"{layer}-{name}")


@pytest.mark.parametrize(("layer", "name"), own_tests())
def test_keras_own_tests_pass(layer, name, monkeypatch):
    # Counts of weights hold for Keras' layer only.
    run = keras_own.MultiHeadAttentionTest.run_layer_test

    def run_without_counts(self, *args, **kwargs):
        kept = {k: v for k, v in kwargs.items() if not k.startswith("expected_num")}
        return run(self, *args, **kept)

    monkeypatch.setattr(
        keras_own.MultiHeadAttentionTest, "run_layer_test", run_without_counts
    )
    # Its calls are not causal, which recurrences refuse.
    refuses = GatedStateAttention, "_check_call"
    monkeypatch.setattr(*refuses, LinearAttention._check_call)
    names = {**vars(keras_own.layers), "MultiHeadAttention": attention_class(layer)}
    monkeypatch.setattr(keras_own, "layers", types.SimpleNamespace(**names))
    result = unittest.TestResult()
    keras_own.MultiHeadAttentionTest(name).run(result)
    failed = [*result.failures, *result.errors]
    assert not failed, failed and failed[0][1][-400:]
