"""Makes pages of the guides, which are scripts in the form of keras.io."""

import re

from mkdocs.structure.files import File

HEADER = re.compile(r'\A"""\nTitle: (.*)\nDescription: (.*)\n"""\n')
TEXT = re.compile(r'^"""\n(.*?)^"""\n', re.M | re.S)


def on_files(files, config):
    for file in list(files):
        if file.src_uri.startswith("guides/") and file.src_uri.endswith(".py"):
            page = page_of(file.content_string)
            uri = file.src_uri.removesuffix(".py") + ".md"
            files.remove(file)
            files.append(File.generated(config, uri, content=page))
        elif file.src_uri.endswith(".py"):
            files.remove(file)
    return files


def page_of(script):
    """Markdown of a script: its texts, and its code as code blocks."""
    title, description = HEADER.match(script).groups()
    parts = [f"# {title}", description]
    pieces = TEXT.split(HEADER.sub("", script))
    # Code and texts alternate, starting with code.
    for i, piece in enumerate(pieces):
        if i % 2:
            parts.append(piece.strip())
        elif piece.strip():
            parts.append(f"```python\n{piece.strip()}\n```")
    return "\n\n".join(parts) + "\n"
