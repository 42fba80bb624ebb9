"""What leaves the gate names tests that exist."""

from pathlib import Path

import pytest

from tests import suites

pytestmark = pytest.mark.any_backend

TESTS = Path(__file__).parent
LISTED = [
    *suites.NIGHTLY,
    *suites.KEPT,
    *suites.ONE_BACKEND,
    *suites.EVERY_BACKEND,
]


@pytest.mark.parametrize("prefix", LISTED)
def test_a_prefix_names_tests(prefix):
    path, _, function = prefix.partition("::")
    files = [file for file in TESTS.rglob("test_*.py") if _begins(file, path)]
    assert files
    name = function.split("[")[0]
    assert not name or any(f"def {name}" in file.read_text() for file in files)


def _begins(file, path):
    return str(file.relative_to(TESTS)).startswith(path)


def test_exceptions_come_from_what_leaves():
    assert all(prefix.startswith(suites.NIGHTLY) for prefix in suites.KEPT)
    assert all(p.startswith(suites.ONE_BACKEND) for p in suites.EVERY_BACKEND)


def test_marks():
    assert suites.marks_of("fuzz/test_layers.py::test_calls") == ["nightly"]
    kept = "contract/test_torch_compile.py::test_a_layer_is_one_program[elu]"
    assert suites.marks_of(kept) == []
    assert suites.marks_of("benchmark/test_cli.py::test_a") == ["one_backend"]
