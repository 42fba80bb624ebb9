"""The scripts print their help without Keras, and so without a backend."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_backend

ROOT = Path(__file__).resolve().parents[2]


def check_help(script, option):
    """Runs `script --help`, without a backend, and looks for the option."""
    done = subprocess.run(
        [sys.executable, ROOT / script, "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "KERAS_BACKEND": "none"},
    )
    assert done.returncode == 0, done.stderr
    assert option in done.stdout
    assert "--backend" in done.stdout


@pytest.mark.parametrize(
    ("script", "option"),
    [
        ("adaptive_computation", "--ponder-cost"),
        ("associative_recall", "--pairs"),
        ("distill_byte_lm", "--teacher"),
        ("image_classification", "--dataset"),
        ("image_generation", "--data"),
        ("image_upscaling", "--factor"),
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
    check_help(f"examples/{script}.py", option)
