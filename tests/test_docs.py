"""The Python on the pages of the documentation runs."""

import re
from pathlib import Path

import pytest

from keras_efficient_attn import benchmark, distribution, layers, models, ops
from keras_efficient_attn.layers import attention_names
from keras_efficient_attn.layers.attention.registry import attention_class

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
    "export.md": "it needs TensorFlow; tests/export runs it",
}
# Small folders in place of checkpoints that are downloaded.
FOLDERS = DOCS.parent / "tests" / "data" / "checkpoints"
CHECKPOINTS = {
    "hf://fla-hub/delta_net-1.3B-100B": "delta_net",
    "hf://fla-hub/gla-1.3B-100B": "gla",
    "hf://fla-hub/retnet-1.3B-100B": "retnet",
    "hf://allenai/Olmo-Hybrid-7B": "olmo_hybrid",
    "hf://google/reformer-enwik8": "reformer_lsh",
    "my_gated_deltanet": "gated_deltanet",
    "my_kda": "kda",
    "my_linear_attn": "linear_attn",
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
        for handle, folder in CHECKPOINTS.items():
            block = block.replace(f'"{handle}"', f'"{FOLDERS / folder}"')
        exec(compile(block, page, "exec"), scope)


@pytest.mark.parametrize("page", OUTLINES)
def test_outlines_are_python(page):
    for block in PAGES[page]:
        compile(block, page, "exec")


def test_the_table_of_names_is_the_registry():
    page = (DOCS / "getting_started.md").read_text()
    table = dict(re.findall(r"^\| `([\w-]+)` \| `(\w+)` \|$", page, re.M))
    assert table == {name: attention_class(name).__name__ for name in attention_names()}


@pytest.mark.parametrize(
    "page",
    [page for page in sorted(DOCS.rglob("*.md")) if page.parent.name != "benchmarks"],
    ids=lambda page: str(page.relative_to(DOCS)),
)
def test_pages_for_users_are_short(page):
    lines = page.read_text().splitlines()
    text = " ".join(line for line in lines if not line.startswith("|"))
    assert len(text.split()) <= 1200


# Files outside the site, whose links the build does not check.
OTHERS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "research/README.md"]
OTHERS = [DOCS.parent / name for name in (*OTHERS, "tools/README.md")]


@pytest.mark.parametrize("page", OTHERS, ids=lambda page: page.parent.name + page.name)
def test_links_of_other_files_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)(#[^)\s]+)?\)", page.read_text())
    for path, anchor in links:
        if "://" in path:
            continue
        target = page.parent / path
        assert target.exists(), path
        if anchor:
            titles = re.findall(r"^#+ (.+)$", target.read_text(), re.M)
            anchors = {
                "#" + re.sub(r"[^\w\s-]", "", title).strip().lower().replace(" ", "-")
                for title in titles
            }
            assert anchor in anchors, path + anchor


@pytest.mark.parametrize("package", [layers, models, ops, distribution, benchmark])
def test_every_public_name_is_on_a_page(package):
    pages = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    for name in package.__all__:
        # Of a module, its functions or classes.
        assert re.search(rf"^::: \S+\.{name}(\.\w+)?$", pages, re.M), name


# What was before, and when, is for the changelog.
HISTORY = r"[Ss]ince then|[Ll]ater that day|an earlier day|were here before|no longer"


TEXTS = [*DOCS.rglob("*.md"), *(DOCS / "guides").glob("*.py"), *OTHERS[:2]]


@pytest.mark.parametrize(
    "page", sorted(TEXTS), ids=lambda page: str(page.relative_to(DOCS.parent))
)
def test_pages_tell_no_history(page):
    assert not re.findall(HISTORY, page.read_text())
