"""Makes the research scripts importable, and checks their argument errors."""

import sys
from pathlib import Path

# The same as for the examples, whose folder this import puts on the path.
from tests.examples.conftest import error_line, printed_table  # noqa: F401

# Scripts have their folder on the path, so these tests need it too.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "research"))
