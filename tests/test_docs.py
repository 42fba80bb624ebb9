"""The Python on the pages of the documentation runs."""

import re
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.any_backend,
    pytest.mark.usefixtures("names_of_the_package"),
]

DOCS = Path(__file__).resolve().parent.parent / "docs"
BLOCK = re.compile(r"```python\n(.*?)```", re.S)
# Pages whose code is not whole, and why.
OUTLINES = {
    "conversion.md": "it needs a trained model and data",
    "distribution.md": "it needs several devices",
}
PAGES = {
    str(page.relative_to(DOCS)): BLOCK.findall(page.read_text())
    for page in sorted(DOCS.rglob("*.md"))
}


def test_outlines_are_pages_with_code():
    assert all(PAGES[page] for page in OUTLINES)


@pytest.mark.parametrize(
    "page", [page for page, blocks in PAGES.items() if blocks and page not in OUTLINES]
)
def test_pages_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {}
    for block in PAGES[page]:
        exec(compile(block, page, "exec"), scope)


@pytest.mark.parametrize("page", OUTLINES)
def test_outlines_are_python(page):
    for block in PAGES[page]:
        compile(block, page, "exec")
