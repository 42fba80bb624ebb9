"""The examples in the package's docstrings run and print the stated results."""

import ast
import doctest
import importlib
import re
import textwrap
from pathlib import Path

import pytest

import keras_efficient_attn

PACKAGE = Path(keras_efficient_attn.__file__).parent


def find_examples():
    """The docstrings of the package that have examples, by their names."""
    finder, found = doctest.DocTestFinder(exclude_empty=True), {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if ">>>" in path.read_text():
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            module = importlib.import_module(".".join(parts))
            found.update((test.name, test) for test in finder.find(module))
    return {name: test for name, test in found.items() if test.examples}


class Checker(doctest.OutputChecker):
    """Treats the shapes of all backends as tuples."""

    def check_output(self, want, got, optionflags):
        got = re.sub(r"(?:TensorShape|torch\.Size)\(\[(.*?)\]\)", self.as_tuple, got)
        return super().check_output(want, got, optionflags)

    @staticmethod
    def as_tuple(match):
        sizes = match[1].split(", ") if match[1] else []
        return f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"


EXAMPLES = find_examples()


@pytest.mark.usefixtures("names_of_the_package")
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_print_what_they_say(name):
    report = []
    runner = doctest.DocTestRunner(checker=Checker(), verbose=False)
    # An example has only the names that it imports, not its module's.
    EXAMPLES[name].globs = {}
    assert not runner.run(EXAMPLES[name], out=report.append).failed, "".join(report)


# Blocks of code that are not whole, and why.
OUTLINES = {
    "compare": "it takes a minute",
    "SequenceParallel": "it needs several devices",
    "get_layout_map": "it needs several devices",
    "TrimSpans": "it needs a model and data",
    "get_initial_state": "it needs a layer and segments",
    "AuxiliaryLosses": "it needs a backbone and data",
    "TransformerXL": "it needs texts",
    "convert_backbone": "it downloads a preset",
    "swap_report": "it needs a trained model",
}


def find_blocks():
    """The blocks of code of each docstring that has some, as one program."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                blocks = re.findall(r"```python\n(.*?)```", text, re.S)
                if blocks:
                    assert node.name not in found
                    found[node.name] = "\n".join(map(textwrap.dedent, blocks))
    return found


BLOCKS = find_blocks()


@pytest.mark.usefixtures("names_of_the_package")
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_code_run(name):
    program = compile(BLOCKS[name], name, "exec")
    if name not in OUTLINES:
        exec(program, {})


def test_outlines_have_blocks():
    assert set(OUTLINES) <= set(BLOCKS)
