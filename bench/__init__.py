"""Benchmarks: modules run from the repository's root, ``python -m bench.runtime.serve``. See README.md."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The repository."""

RESULTS = ROOT / "bench" / "results"
