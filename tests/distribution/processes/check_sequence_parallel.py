"""Sequences split over the processes of `torchrun`, against one process."""

import re

import numpy as np
import pytest
import torch
import torch.distributed as distributed

from keras_efficient_attn import ops
from keras_efficient_attn.distribution import SequenceParallel
from tests.distribution.sequence_cases import CASES, WRONG_WEIGHTS, make_inputs

WHOLE = "codebook", "sigma"
DIFFERENTIATED = "query", "key", "value", "log_decay", "beta"


def values(name, target, arrays, weights):
    """The output, and gradients of the sum of its products with weights."""
    inputs = {key: torch.from_numpy(x.copy()) for key, x in arrays.items()}
    for key in DIFFERENTIATED:
        inputs[key].requires_grad_()
    output = CASES[name](target, inputs, target is ops)
    (output * torch.from_numpy(weights.copy())).sum().backward()
    return output.detach(), {key: inputs[key].grad for key in DIFFERENTIATED}


def check_transposed(split, rank):
    """Views of `(batch, heads, length, dim)` in memory, and such gradients."""
    arrays = make_inputs(8 * split.num_devices)
    mine = slice(8 * rank, 8 * (rank + 1))
    weights = torch.from_numpy(np.cos(arrays["query"]))
    results = []
    for target, own in ((ops, slice(None)), (split, mine)):
        inputs = {}
        for name in ("query", "key", "value"):
            x = torch.from_numpy(arrays[name][:, own]).transpose(1, 2).contiguous()
            inputs[name] = x.transpose(1, 2).requires_grad_()
        inputs["key_mask"] = torch.from_numpy(arrays["key_mask"][:, own])
        output = CASES["window"](target, inputs, target is ops)
        (output.transpose(1, 2) * weights[:, own].transpose(1, 2)).sum().backward()
        gradients = [inputs[name].grad for name in ("query", "key", "value")]
        results.append([output.detach(), *gradients])
    for expected, received in zip(*results, strict=True):
        np.testing.assert_allclose(received, expected[:, mine], rtol=1e-4, atol=1e-5)


def check_arrays(split, rank):
    """Arrays of NumPy instead of tensors."""
    arrays = make_inputs(8 * split.num_devices)
    mine = slice(8 * rank, 8 * (rank + 1))
    parts = {k: x if k in WHOLE else x[:, mine] for k, x in arrays.items()}
    tensors = {k: torch.from_numpy(x) for k, x in arrays.items()}
    for name in ("weighted", "decay", "window", "soft codes"):
        expected = CASES[name](ops, tensors, True)
        received = CASES[name](split, parts, False)
        np.testing.assert_allclose(received, expected[:, mine], rtol=1e-4, atol=1e-5)


def check_refusals(split, rank):
    x = make_inputs(8)
    for shape in WRONG_WEIGHTS:
        x["key_log_weight"] = np.zeros(shape, "float32")
        message = f"`key_log_weight`.*{re.escape(str(shape))}"
        with pytest.raises(ValueError, match=message):
            CASES["weighted"](split, x, False)
    x = torch.ones(1, 8, 2, 4)
    with pytest.raises(TypeError, match="SequenceParallel.*'implementation'"):
        split.linear_attention(x, x, x, implementation="chunked")
    with pytest.raises(ValueError, match="`scope` works on JAX only"), split.scope():
        pass
    with pytest.raises(ValueError, match="`axis_name`.*'time'"):
        SequenceParallel(axis_name="time")
    first = distributed.new_group([0])
    if rank == 0:
        assert SequenceParallel(group=first).num_devices == 1
    else:
        with pytest.raises(ValueError, match=f"`group`.*without process {rank}"):
            SequenceParallel(group=first)


def main():
    distributed.init_process_group("gloo")
    split, rank = SequenceParallel(), distributed.get_rank()
    length = 24 * split.num_devices
    arrays = make_inputs(length)
    weights = np.random.default_rng(1).normal(size=arrays["value"].shape)
    weights = weights.astype("float32")
    mine = slice(24 * rank, 24 * (rank + 1))
    parts = {k: x if k in WHOLE else x[:, mine] for k, x in arrays.items()}
    for name in CASES:
        expected, expected_gradients = values(name, ops, arrays, weights)
        output, gradients = values(name, split, parts, weights[:, mine])
        np.testing.assert_allclose(output, expected[:, mine], rtol=1e-5, atol=1e-5)
        for key, gradient in expected_gradients.items():
            if gradient is None:
                assert gradients[key] is None
                continue
            atol = 1e-5 * max(1.0, gradient.abs().max().item())
            np.testing.assert_allclose(
                gradients[key], gradient[:, mine], rtol=1e-4, atol=atol, err_msg=name
            )
    check_transposed(split, rank)
    check_arrays(split, rank)
    check_refusals(split, rank)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
