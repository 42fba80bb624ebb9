"""The README names each script with a page, and the page names the script."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_backend

RESEARCH = Path(__file__).resolve().parents[2] / "research"
ROWS = re.findall(
    r"^\| `(\w+\.py)` \| \[.*?\]\((.*?)\)",
    (RESEARCH / "README.md").read_text(),
    re.MULTILINE,
)


def test_every_script_has_a_row():
    scripts = [
        path.name for path in RESEARCH.glob("*.py") if "__main__" in path.read_text()
    ]
    assert [script for script, _ in ROWS] == sorted(scripts)


@pytest.mark.parametrize(("script", "page"), ROWS)
def test_the_page_names_the_script(script, page):
    assert f"research/{script}" in (RESEARCH / page).read_text()
