"""The documentation's table of supported models matches the tests."""

import re
from pathlib import Path

import pytest

import keras_efficient_attn
from keras_efficient_attn.models.conversion.sites import find_sites
from tests.models.conversion import families
from tests.models.conversion.test_generation import SEQ2SEQ_TASKS, TASKS

pytestmark = pytest.mark.any_backend
PAGE = Path(keras_efficient_attn.__file__).parents[1] / "docs" / "conversion.md"


def test_table_of_the_documentation():
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (\w*) ?\|$", PAGE.read_text(), re.M)
    expected = set()
    for name, (backbone_class, _, _) in families.FAMILIES.items():
        layers = {type(site.layer).__name__ for site in find_sites(families.make(name))}
        (layer,) = layers - {"MultiHeadAttention"} or layers
        generates = "yes" if name in {*TASKS, *SEQ2SEQ_TASKS} else ""
        expected.add((backbone_class.__name__, layer, generates))
    assert len(rows) == len(set(rows))
    assert set(rows) == expected
