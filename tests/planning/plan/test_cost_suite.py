"""The cost suite: every section next to its paper, a single self-contained file, and the papers' claims in words."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.cost import pooled, report, second_paper
from bench.cost.bursts import Elastic
from lamina.cli import app, bench
from lamina.core.errors import LaminaError, UserError

Made = tuple[str, dict[str, Any]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The report and its numbers, with simulations of few requests."""
    page, numbers = (tmp_path_factory.mktemp("cost") / name for name in ("r.html", "r.json"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(second_paper, "SIMULATED", 16)
        patch.setattr(pooled, "REQUESTS", 10)
        patch.setattr(sys, "argv", ["report.py", "--out", str(page), "--json", str(numbers)])
        report.main()
    return page.read_text(), json.loads(numbers.read_text())


@pytest.mark.slow
def test_the_command_writes_the_whole_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(app, ["bench", "cost"], catch_exceptions=False)
    assert (tmp_path / "lamina-cost.html").read_text().count("<h2>") == 15


def section(numbers: dict[str, Any], title: str) -> dict[str, Any]:
    found: dict[str, Any] = next(own for name, own in numbers.items() if title in name)
    return found


@pytest.mark.slow  # the whole report is made for these
def test_one_file_that_loads_nothing(made: Made) -> None:
    page, numbers = made
    assert not re.findall(r'(?:src|href)="(?!#)[^"]*"|url\((?!#)', page)
    assert page.count("<svg") >= 10 and page.count("<h2>") == len(numbers) == 15
    identifiers = re.findall(r'\bid="([^"]+)"', page)
    assert len(set(identifiers)) == len(identifiers)
    # Text takes the page's colour, light or dark: none of it is black.
    assert "#010203" not in page and "fill: #000" not in page


@pytest.mark.slow  # the whole report is made for these
def test_table_3_is_ordered_as_published(made: Made) -> None:
    cells = section(made[1], "Table 3")["table_3"]
    assert len(cells) == 12
    assert [(c["published_gb_s"]) for c in cells if c["model"] == "LLaMA-65B"] == [7.55, 11.78, 13.92, 15.90]
    by_model = {m: [c for c in cells if c["model"] == m] for m in ("LLaMA-13B", "LLaMA-33B", "LLaMA-65B")}
    for own in by_model.values():
        assert [c["gb_s"] for c in own] == sorted(c["gb_s"] for c in own)
        assert [c["utilisation"] for c in own] == sorted(c["utilisation"] for c in own)
    for same_batch in zip(*by_model.values(), strict=True):
        assert [c["gb_s"] for c in same_batch] == sorted(c["gb_s"] for c in same_batch)
        assert [c["utilisation"] for c in same_batch] == sorted((c["utilisation"] for c in same_batch), reverse=True)
    for cell in cells:
        # 4 e d B L bytes in the time that 2 N B operations take at this use of peak (section 4.2).
        ratio = cell["utilisation"] / cell["published_utilisation"]
        assert cell["gb_s"] / cell["published_gb_s"] == pytest.approx(ratio)
    published = [c["published_utilisation"] for c in by_model["LLaMA-13B"]]
    assert (published[0], published[-1]) == (pytest.approx(0.25, abs=0.01), pytest.approx(0.51, abs=0.01))


@pytest.mark.slow  # the whole report is made for these
def test_offloading_pays_per_dollar_in_the_published_magnitude(made: Made) -> None:
    rows = {
        row["what"]: row["ours"]
        for row in section(made[1], "Figures 12")[
            "Figure 12 and 13, lowest and highest over both models and contexts of 512 to 4096"
        ]
    }
    low, high = rows["throughput per dollar over vLLM's"]
    assert 1.48 < low < high < 12.1 * 1.1
    low, high = rows["two lanes over one, batches above 128"]
    assert 1.0 < low < high < 1.8


@pytest.mark.slow  # the whole report is made for these
def test_longer_contexts_gain_more(made: Made) -> None:
    gains = section(made[1], "Figure 1:")["gains"]
    assert all(long > short > 1 for short, long in zip(gains["512"], gains["4096"], strict=True))
    equal = section(made[1], "equal cost")["gains"]
    assert len(equal) == 12
    assert len(section(made[1], "equal cost")["simulated_gains"]) == 12
    assert equal["Llama-3-70B, Kimi-Conv"] > equal["Llama-3-70B, Azure-Conv"]


@pytest.mark.slow  # the whole report is made for these
def test_as_many_h20_as_the_paper_takes_where_its_sequences_are_short(made: Made) -> None:
    ours = section(made[1], "equal cost")
    counts = [ours[f"recommended H20, {name}"] for name in ("Azure-Conv", "Azure-Code", "Kimi-TA", "Kimi-Conv")]
    assert counts == sorted(counts)  # in the order of their lengths
    assert all(2 <= count <= 6 for count in counts[:2])  # the paper: 4 for 2 H100


@pytest.mark.slow  # the whole report is made for these
def test_the_creditor_helps_until_its_room_is_used(made: Made) -> None:
    rows = {row["what"]: row["ours"] for row in section(made[1], "debtor")["Both together"]}
    assert 1.1 < rows["best over nothing moved"] < 1.6


@pytest.mark.slow  # the whole report is made for these
def test_instances_together_hold_what_each_holds(made: Made) -> None:
    numbers = made[1]
    rows = {row["what"]: row["ours"] for row in section(numbers, "Mechanisms")["What the cost model covers"]}
    one, many = (rows[f"longest context, Llama-2-7B, {count} x TP1"] for count in (1, 16))
    assert many == 16 * one


@pytest.mark.slow  # the whole report is made for these
def test_bursts_pay_more_the_longer_devices_take(made: Made) -> None:
    """Replicas load weights besides, and more of them are paid for meanwhile."""
    own = section(made[1], "bursts")
    for what in ("Llama-3-8B, attention on h100", "Llama-3-70B, attention on h20"):
        saving = own[what]["saving percent"]
        for length in ("60 s", "300 s", "1200 s"):
            by_delay = [saving[f"{delay} s delay, {length}"] for delay in (0, 10, 60, 180)]
            assert by_delay == sorted(by_delay)
        assert own[what]["two pools"]["load_s"] == 0 < own[what]["replicas"]["load_s"]
    # By hand: what stays is paid for an hour, what is added from the request to the end of the burst.
    full = own["Llama-3-8B, attention on h100"]["replicas"]
    assert Elastic(**full).usd(60, 10) == pytest.approx(full["kept"] + full["added"] * (70 + full["load_s"]) / 3600)


def test_a_package_without_the_suite_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "SUITE", tmp_path / "report.py")
    with pytest.raises(UserError, match="Run it from a checkout"):
        CliRunner().invoke(app, ["bench", "cost"], catch_exceptions=False)


def test_a_report_that_cannot_be_written_is_refused_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lamina-cost.html").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"the report is .*lamina-cost.html', which cannot be written"):
        CliRunner().invoke(app, ["bench", "cost"], catch_exceptions=False)


def test_a_suite_that_does_not_end_is_stopped_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "report.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(bench, "SUITE", tmp_path / "report.py")
    monkeypatch.setattr(bench, "SUITE_TIMEOUT_S", 0.2)
    with pytest.raises(
        LaminaError, match=r"did not finish within 0\.2 s.*Run it without a time limit: python .*report\.py"
    ):
        CliRunner().invoke(app, ["bench", "cost"], catch_exceptions=False)
