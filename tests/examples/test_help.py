"""The scripts print their help without Keras, and so without a backend."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_backend

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    ("script", "option"),
    [
        ("adaptive_computation", "--ponder-cost"),
        ("associative_recall", "--pairs"),
        ("distill_byte_lm", "--teacher"),
        ("image_classification", "--dataset"),
        ("image_generation", "--data"),
        ("image_upscaling", "--factor"),
        ("measure_generation", "--batches"),
        ("measure_patterns", "--modes"),
        ("measure_soft_codes", "--fit-steps"),
        ("measure_xl_evaluation", "--contexts"),
        ("reformer_duplication", "--buckets"),
        ("rl_memory", "--agents"),
        ("swap_attention", "--preset"),
        ("text_classification", "--csv"),
        ("train_byte_lm", "--compare"),
        ("train_distributed", "--strategy"),
        ("universal_transformer", "--tasks"),
        ("vq_recurrence", "--codes"),
        ("word_lm", "--stride"),
        ("xl_recall", "--models"),
    ],
)
def test_help_needs_no_backend(script, option):
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{script}.py", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "KERAS_BACKEND": "none"},
    )
    assert done.returncode == 0, done.stderr
    assert option in done.stdout
    assert "--backend" in done.stdout
