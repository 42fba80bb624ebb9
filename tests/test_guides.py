"""The guides run, with settings that take seconds."""

import re
from pathlib import Path

import matplotlib
import pytest

pytestmark = pytest.mark.any_backend

GUIDES = Path(__file__).resolve().parent.parent / "docs" / "guides"
SETTINGS = {
    "constant_cost_generation": {
        "SEQUENCE_LENGTH": 64,
        "TRAINING_SEQUENCES": 32,
        "VALIDATION_SEQUENCES": 8,
        "EPOCHS": 1,
        "CONTEXT_LENGTHS": [4, 8],
        "NEW_TOKENS": 1,
    },
    "long_document_classifier": {
        "DOCUMENT_LENGTH": 256,
        "TRAINING_DOCUMENTS": 24,
        "VALIDATION_DOCUMENTS": 12,
        "EPOCHS": 2,
    },
    "replace_trained_attention": {
        "SEQUENCE_LENGTH": 64,
        "TRAINING_DOCUMENTS": 32,
        "VALIDATION_DOCUMENTS": 16,
        "EPOCHS": 1,
        "DISTILLATION_EPOCHS": 1,
    },
}


def test_every_guide_has_a_small_setting():
    assert {path.stem for path in GUIDES.glob("*.py")} == set(SETTINGS)


@pytest.mark.parametrize("name", SETTINGS)
def test_guides_run(name, tmp_path, monkeypatch):
    script = (GUIDES / f"{name}.py").read_text()
    for constant, value in SETTINGS[name].items():
        script, found = re.subn(
            rf"(?m)^{constant} = .*$", f"{constant} = {value}", script
        )
        assert found == 1, constant
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    exec(compile(script, f"{name}.py", "exec"), {"__name__": name})
    picture = (tmp_path / f"{name}.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    # The page shows the committed picture by this name.
    assert f"]({name}.png)" in script and (GUIDES / f"{name}.png").exists()
