"""Sequences split over the processes of `torchrun`, against one process."""

import numpy as np
import torch
import torch.distributed as distributed

from keras_efficient_attn import ops
from keras_efficient_attn.distribution import SequenceParallel
from tests.distribution.sequence_cases import CASES, make_inputs

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
    try:
        with split.scope():
            raise AssertionError("The scope works on JAX only.")
    except ValueError as error:
        assert "`scope` works on JAX only" in str(error), error
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
