"""Makes helpers importable: those beside these tests, and the split models and reference runtime of tests/splitter."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "splitter")]
