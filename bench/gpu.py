"""``python bench/gpu.py`` is ``python -m bench.gpu``; ``import bench.gpu`` finds the package, not this file."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # the repository's root in place of bench/
    runpy.run_module("bench.gpu", run_name="__main__", alter_sys=True)
