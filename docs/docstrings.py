"""Makes code blocks of the examples in docstrings."""

import re

import griffe

# Matches from a prompt to the next empty line.
EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.M)


class Examples(griffe.Extension):
    def on_object(self, *, obj, **kwargs):
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(
                lambda match: f"```pycon\n{match[0]}\n```", obj.docstring.value
            )
