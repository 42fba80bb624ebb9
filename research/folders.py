"""Puts this checkout and its folder `examples` on the path of modules.

A script imports it before the modules of `examples` and `tools` that it uses.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "examples"), str(ROOT)]
