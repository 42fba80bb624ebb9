"""Puts this checkout's folders `examples` and `tools` on the path of modules.

A script imports it before the modules of those folders that it uses.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / name) for name in ("examples", "tools")]
