"""Runs guides of the documentation, and keeps what they print for their pages.

    KERAS_BACKEND=jax python -m tools.run_guides long_document_classifier

Writes `docs/guides/NAME.json` and the picture of the guide.
"""

import argparse
import contextlib
import io
import json
import os
import sys
from pathlib import Path

from tools.benchmark_pages import machine

GUIDES = Path(__file__).resolve().parent.parent / "docs" / "guides"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = sorted(path.stem for path in GUIDES.glob("*.py"))
    parser.add_argument("guides", nargs="+", choices=names)
    guides = parser.parse_args(argv).guides
    import matplotlib

    from keras_efficient_attn.benchmark.worker import describe_environment

    matplotlib.use("agg")
    os.chdir(GUIDES)
    for name in guides:
        outputs = run((GUIDES / f"{name}.py").read_text(), name)
        run_of = {"machine": machine(describe_environment()), "outputs": outputs}
        (GUIDES / f"{name}.json").write_text(json.dumps(run_of, indent=1) + "\n")


def run(script, name):
    """Runs a guide's blocks of code in one scope.

    Args:
        script: The guide's text.
        name: The module's name that the code sees.

    Returns:
        List of what each block printed.
    """
    from docs.hooks import pieces_of

    scope, outputs = {"__name__": name}, []
    for block in pieces_of(script)[::2]:
        if block.strip():
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(block, f"{name}.py", "exec"), scope)
            outputs.append(printed.getvalue())
    return outputs


if __name__ == "__main__":
    sys.exit(main())
