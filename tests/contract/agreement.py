"""Outputs of all cases for given weights; run as a script on another backend."""

import sys

import numpy as np

from tests.autodiff import to_numpy
from tests.contract.cases import CASES, inputs


def outputs():
    """`{case and setting: output}`, from weights that NumPy draws."""
    results = {}
    for case in CASES:
        layer = case.built()
        random = np.random.default_rng(7)
        for weight in layer.weights:
            if "float" in str(weight.dtype):
                weight.assign(random.normal(size=weight.shape) * 0.4)
        for causal in case.causal:
            x = inputs()
            output = layer(x, x, use_causal_mask=causal)
            results[f"{case.name} causal={causal}"] = to_numpy(output)
    return results


if __name__ == "__main__":
    np.savez(sys.argv[1], **outputs())
