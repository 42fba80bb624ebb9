"""Makes pages and notebooks of the guides, scripts in the form of keras.io."""

import json
import re
from pathlib import Path

HEADER = re.compile(r'\A"""\nTitle: (.*)\nDescription: (.*)\n"""\n')
# A link to a page, which a notebook makes to the site; its pages are folders.
PAGE_LINK = re.compile(r"\]\(\.\./([\w/]+)\.md")
TEXT = re.compile(r'^"""\n(.*?)^"""\n', re.M | re.S)


def on_files(files, config):
    # Only the pages need MkDocs; tests use the rest.
    from mkdocs.structure.files import File

    for file in list(files):
        if file.src_uri.startswith("guides/") and file.src_uri.endswith(".py"):
            kept = Path(file.abs_src_path).with_suffix(".json")
            run = json.loads(kept.read_text()) if kept.exists() else None
            script = file.content_string
            files.remove(file)
            for ending, content in (
                (".md", page_of(script, run, f"{file.name}.ipynb")),
                (".ipynb", json.dumps(notebook_of(script, config), indent=1)),
            ):
                uri = file.src_uri.removesuffix(".py") + ending
                files.append(File.generated(config, uri, content=content))
        elif file.src_uri.endswith((".py", ".json")):
            files.remove(file)
    return files


def page_of(script, run, notebook):
    """Markdown of a script: its texts, and its code with what it printed.

    Args:
        script: The guide.
        run: Dict of `machine` and `outputs`, a text for each block of code; or `None`,
            if the guide was not run.
        notebook: Name of the notebook beside the page.
    """
    title, description = HEADER.match(script).groups()
    parts = [f"# {title}", f"{description} ([Notebook]({notebook}).)"]
    outputs = iter(run["outputs"] if run else ())
    for i, piece in enumerate(pieces_of(script)):
        if i % 2:
            parts.append(piece.strip())
        elif piece.strip():
            parts.append(f"```python\n{piece.strip()}\n```")
            if output := next(outputs, "").strip():
                parts.append(f"```text\n{output}\n```")
    if run:
        parts.append(f"(Run with {run['machine']}.)")
    return "\n\n".join(parts) + "\n"


def notebook_of(script, config):
    """A Jupyter notebook of a script, as a dict: its texts and its code, not run.

    Args:
        script: The guide.
        config: Of MkDocs, with `site_url` and `repo_url`.
    """
    title, description = HEADER.match(script).groups()
    install = (
        "%pip install -q 'keras_efficient_attn[examples,jax] @ "
        f"git+{config.repo_url}'\n%env KERAS_BACKEND=jax"
    )
    cells = [("markdown", f"# {title}\n\n{description}"), ("code", install)]
    for i, piece in enumerate(pieces_of(script)):
        if piece.strip():
            text = PAGE_LINK.sub(rf"]({config.site_url}\1/", piece) if i % 2 else piece
            cells.append(("markdown" if i % 2 else "code", text.strip()))
    own = {"code": {"execution_count": None, "outputs": []}, "markdown": {}}
    return {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {},
        "cells": [
            {
                "id": f"cell-{i}",
                "cell_type": kind,
                "metadata": {},
                "source": text.splitlines(keepends=True),
                **own[kind],
            }
            for i, (kind, text) in enumerate(cells)
        ],
    }


def pieces_of(script):
    """The code and the texts of a guide, in turn; code comes first."""
    return TEXT.split(HEADER.sub("", script))
