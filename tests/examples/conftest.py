"""Makes the examples importable, and checks how they refuse arguments."""

import sys
from pathlib import Path

import pytest

# Scripts have their own folder on the path; so do the tests of what they import.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))


@pytest.fixture
def error_line(capsys):
    """The one line that `script.main(arguments)` ends with, as an error."""

    def run(script, arguments):
        assert script.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"{script.__name__}.py: error: ")
        assert error.count("\n") == 1
        return error

    return run
