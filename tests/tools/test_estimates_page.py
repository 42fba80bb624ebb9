"""The page of accelerators has the estimates of the repository."""

import pytest

from tools.estimates_page import PAGE, page

pytestmark = pytest.mark.any_backend


def test_the_table_is_that_of_the_json():
    text = PAGE.read_text()
    assert page(text) == text
    assert page(text.replace("| `gated-delta` |", "| `another` |", 1)) == text
