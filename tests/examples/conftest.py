"""Makes the examples importable, and checks their argument errors."""

import sys
from pathlib import Path

import pytest

# Scripts have their folder on the path, so these tests need it too.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))


@pytest.fixture
def error_line(capsys):
    """The single error line of `script.main(arguments)`."""

    def run(script, arguments):
        assert script.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"{script.__name__}.py: error: ")
        assert error.count("\n") == 1
        return error

    return run


@pytest.fixture
def printed_table(capsys):
    """The cells of the only table that was printed, lists: the header and the rows.

    Without `printed`, what was printed since the last call counts.
    """

    def cells(printed=None):
        printed = capsys.readouterr().out if printed is None else printed
        rows = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in printed.splitlines()
            if line.startswith("| ")
        ]
        assert set(rows.pop(1)) == {"---"}
        return rows

    return cells
