"""Predictions of measured serving: errors of the rows that docs/cost-model.md reports stay within these ranges."""

import numpy as np
import pytest

from bench.cost import measured


@pytest.mark.parametrize(
    ("name", "every", "ttft", "tpot", "tokens"),
    [
        ("rtx4090", 1, (0.10, 0.15), (0.08, 0.20), 0.08),  # nearly full: most of what it holds are weights
        ("rtxpro6000", 1, (0.15, 0.35), (0.06, 0.15), 0.07),
        ("qwen3_32b", 5, (0.20, 0.35), (0.06, 0.15), 0.06),
        ("gpt_oss", 5, (0.15, 0.25), (0.06, 0.15), 0.06),
    ],
)
def test_errors_on_rows_held_out(
    name: str, every: int, ttft: tuple[float, float], tpot: tuple[float, float], tokens: float
) -> None:
    """Medians and 90th percentiles."""
    files = [file for file in measured.FILES if name in file.file]
    found = [row for row in measured.predict(every, files) if not row.fitted]
    assert found
    for what, most in (("ttft", ttft), ("tpot", tpot), ("tokens_s", (tokens, 0.15))):
        errors = measured.error([getattr(row, what) for row in found])[:2]
        assert np.all(np.array(errors) <= most), (what, errors)
