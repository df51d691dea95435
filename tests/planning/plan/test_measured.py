"""Predictions of measured serving: errors of the rows that docs/cost-model.md reports stay within these ranges."""

import pytest

from bench.cost import measured


@pytest.mark.parametrize(
    ("name", "every", "ttft", "tpot", "tokens"),
    [
        ("rtx4090", 1, 0.10, 0.08, 0.08),  # nearly full: most of what it holds are weights
        ("rtxpro6000", 1, 0.15, 0.06, 0.07),
        ("qwen3_32b", 5, 0.20, 0.06, 0.06),
        ("gpt_oss", 5, 0.20, 0.06, 0.06),
    ],
)
def test_median_errors_on_rows_held_out(name: str, every: int, ttft: float, tpot: float, tokens: float) -> None:
    files = [file for file in measured.FILES if name in file.file]
    found = [row for row in measured.predict(every, files) if not row.fitted]
    assert found
    for what, most in (("ttft", ttft), ("tpot", tpot), ("tokens_s", tokens)):
        assert measured.error([getattr(row, what) for row in found])[0] <= most, what
