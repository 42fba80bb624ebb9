"""Runs README's examples, as a user would; as a script, for an installed package.

python tests/readme.py
"""

from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def run_examples():
    """Runs each block of Python in README by itself.

    Returns:
        List of the names that each block defines, in README's order.
    """
    scopes = []
    for part in README.read_text().split("```python\n")[1:]:
        scopes.append({})
        exec(part.split("```")[0], scopes[-1])
    return scopes


if __name__ == "__main__":
    print(f"{len(run_examples())} examples of README ran")
