"""Makes pages of the guides, which are scripts in the form of keras.io."""

import json
import re
from pathlib import Path

HEADER = re.compile(r'\A"""\nTitle: (.*)\nDescription: (.*)\n"""\n')
TEXT = re.compile(r'^"""\n(.*?)^"""\n', re.M | re.S)


def on_files(files, config):
    # Only the pages need MkDocs; tests use the rest.
    from mkdocs.structure.files import File

    for file in list(files):
        if file.src_uri.startswith("guides/") and file.src_uri.endswith(".py"):
            kept = Path(file.abs_src_path).with_suffix(".json")
            run = json.loads(kept.read_text()) if kept.exists() else None
            page = page_of(file.content_string, run)
            uri = file.src_uri.removesuffix(".py") + ".md"
            files.remove(file)
            files.append(File.generated(config, uri, content=page))
        elif file.src_uri.endswith((".py", ".json")):
            files.remove(file)
    return files


def page_of(script, run):
    """Markdown of a script: its texts, and its code with what it printed.

    Args:
        script: The guide.
        run: Dict of `machine`, `date` and `outputs`, a text for each block of code; or
            `None`, if the guide was not run.
    """
    title, description = HEADER.match(script).groups()
    parts = [f"# {title}", description]
    outputs = iter(run["outputs"] if run else ())
    for i, piece in enumerate(pieces_of(script)):
        if i % 2:
            parts.append(piece.strip())
        elif piece.strip():
            parts.append(f"```python\n{piece.strip()}\n```")
            if output := next(outputs, "").strip():
                parts.append(f"```text\n{output}\n```")
    if run:
        parts.append(f"(Printed on {run['machine']}, {run['date']}.)")
    return "\n\n".join(parts) + "\n"


def pieces_of(script):
    """The code and the texts of a guide, in turn; code comes first."""
    return TEXT.split(HEADER.sub("", script))
