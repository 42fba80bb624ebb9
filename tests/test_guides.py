"""The guides print what their pages show, with settings that take seconds."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import pytest

from docs import hooks
from tools import run_guides

pytestmark = pytest.mark.any_backend

GUIDES = Path(__file__).resolve().parent.parent / "docs" / "guides"
SETTINGS = {
    "bytes_at_32k": {
        "LENGTH": 256,
        "STEPS": 4,
        "VALIDATION_ROWS": 2,
        "TIMED_LENGTHS": [32, 64],
    },
    "constant_cost_generation": {
        "SEQUENCE_LENGTH": 64,
        "TRAINING_SEQUENCES": 32,
        "VALIDATION_SEQUENCES": 8,
        "EPOCHS": 1,
        "CONTEXT_LENGTHS": [4, 8],
        "NEW_TOKENS": 1,
    },
    "image_attention_axes": {
        "SIZE": 16,
        "TRAINING_IMAGES": 64,
        "VALIDATION_IMAGES": 32,
        "EPOCHS": 2,
    },
    "long_document_classifier": {
        "DOCUMENT_LENGTH": 256,
        "TRAINING_DOCUMENTS": 24,
        "VALIDATION_DOCUMENTS": 12,
        "EPOCHS": 2,
    },
    "published_checkpoint": {
        "VOCABULARY_SIZE": 300,
        "SEQUENCE_LENGTH": 32,
        "TEXTS": 32,
        "EPOCHS": 1,
        "FINE_TUNING_TEXTS": 12,
        "FINE_TUNING_EPOCHS": 2,
    },
    "replace_trained_attention": {
        "SEQUENCE_LENGTH": 64,
        "TRAINING_DOCUMENTS": 32,
        "VALIDATION_DOCUMENTS": 16,
        "EPOCHS": 1,
        "DISTILLATION_EPOCHS": 1,
    },
    "time_series_streaming": {
        "LENGTH": 512,
        "TRAINING_SERIES": 8,
        "VALIDATION_SERIES": 4,
        "EPOCHS": 2,
        "STREAM_LENGTH": 32,
    },
}


# The two addresses that `mkdocs.yml` gives to hooks.
PLACES = SimpleNamespace(
    site_url="https://site.example/", repo_url="https://code.example/repository"
)


def test_every_guide_has_a_small_setting():
    assert {path.stem for path in GUIDES.glob("*.py")} == set(SETTINGS)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_notebook_runs_what_the_guide_runs(name):
    script = (GUIDES / f"{name}.py").read_text()
    notebook = json.loads(json.dumps(hooks.notebook_of(script, PLACES)))
    code = [
        "".join(cell["source"])
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]
    without_texts = re.sub(r'(?ms)^"""\n.*?^"""\n', "", script)
    texts = "".join("".join(cell["source"]) for cell in notebook["cells"])
    assert "](../" not in texts and "OWNER" not in texts
    assert f"git+{PLACES.repo_url}'" in code[0]
    lines = "\n".join(code[1:]).splitlines()
    assert [line for line in lines if line] == [
        line for line in without_texts.splitlines() if line
    ]


def plain(text):
    """The lines without their numbers, each once."""
    text = re.sub(r"[\d.,]+(e-?\d+)?(m?s\b)?", "0", text)
    lines = {" ".join(line.split()) for line in text.splitlines()}
    # Keras names no epoch where there is one.
    return lines - {"Epoch 0/0"}


@pytest.mark.parametrize("name", SETTINGS)
def test_guides_print_what_their_pages_show(name, tmp_path, monkeypatch):
    script = (GUIDES / f"{name}.py").read_text()
    for constant, value in SETTINGS[name].items():
        script, found = re.subn(
            rf"(?m)^{constant} = .*$", f"{constant} = {value}", script
        )
        assert found == 1, constant
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    printed = run_guides.run(script, name)
    picture = (tmp_path / f"{name}.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    # The page shows the committed picture by this name.
    assert f"]({name}.png)" in script and (GUIDES / f"{name}.png").exists()
    shown = json.loads((GUIDES / f"{name}.json").read_text())["outputs"]
    blocks = [block for block in hooks.pieces_of(script)[::2] if block.strip()]
    for block, here, there in zip(blocks, printed, shown, strict=True):
        if "generate(" in block or "urlopen(" in block:
            assert bool(here.strip()) == bool(there.strip())
        else:
            assert plain(here) == plain(there)
