"""The scripts print their help without Keras, and so without a backend."""

import pytest

from tests.examples.test_help import check_help

pytestmark = pytest.mark.any_backend


@pytest.mark.parametrize(
    ("script", "option"),
    [
        ("claim_features", "--logits"),
        ("claim_gates", "--learning-rates"),
        ("claim_length", "--lengths"),
        ("claim_rank", "--symbols"),
        ("claim_regression", "--correlation"),
        ("claim_spans", "--penalties"),
        ("claim_variants", "--windows"),
        ("estimate_slices", "--slices"),
        ("measure_reversible", "--depths"),
        ("measure_soft_codes", "--fit-steps"),
        ("measure_xl_evaluation", "--contexts"),
        ("verdict_page", "--results"),
        ("verdict_run", "--candidates"),
    ],
)
def test_help_needs_no_backend(script, option):
    check_help(f"research/{script}.py", option)
