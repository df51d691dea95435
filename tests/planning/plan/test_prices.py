"""Prices: one market at a time, every price with its source, and what is not priced refused by name."""

import re
from datetime import date
from pathlib import Path

import pytest

from lamina.core.errors import ConfigError
from lamina.planning.plan import hardware, prices

KINDS = hardware.load().kinds
HOURS = 3 * 365 * 24


def test_every_price_is_of_a_kind_and_says_where_and_when_it_is_from() -> None:
    assert prices.names() == ["aws", "gcp", "own", "paper", "pods", "runpod"]
    for name in prices.names():
        market = prices.load(name)
        assert market.entries.keys() <= KINDS.keys() and market.market and market.includes
        assert all(price.usd > 0 and price.source and price.date for price in market.entries.values())


def test_the_papers_prices_over_the_catalogue() -> None:
    """Lamina Table 1: dollars per GB (of 2^30) and per GB/s."""
    own = prices.load("own")
    per_gb = {"a100-80g": 219, "h100": 456, "rtx3090": 67, "rx7900xtx": 42, "arc-a770": 22}
    per_gb_s = {"h100": 10.90, "rtx3090": 1.71, "rx7900xtx": 1.04, "arc-a770": 0.63}
    for kind, whole in per_gb.items():
        assert own.entries[kind].usd / (KINDS[kind].memory_bytes / 2**30) == pytest.approx(whole, abs=0.6)
    for kind, dollars in per_gb_s.items():
        assert own.entries[kind].usd / (KINDS[kind].memory_bytes_s / 1e9) == pytest.approx(dollars, abs=0.006)
    paper = prices.load("paper")
    assert [paper.usd_per_hour(KINDS[kind]) for kind in ("h100", "h20")] == [11.06, 4.63]


def test_what_is_bought_is_spread_over_its_years_with_electricity_and_network() -> None:
    own = prices.load("own")
    assert own.usd_per_hour(KINDS["rx7900xtx"]) == pytest.approx(1000 / HOURS + 0.355 * 0.12)
    file = prices.Prices(name="x", entries=own.entries, years=3, usd_per_kwh=0.12, network_usd=2000)
    alone, networked = (file.usd_per_hour(KINDS["h100"], networked=joined) for joined in (False, True))
    assert networked - alone == pytest.approx(2000 / HOURS)


def test_prices_of_more_than_90_days_ago_are_warned_of() -> None:
    pods, aws = prices.load(), prices.load("aws")
    (warning,) = pods.warnings(["h100", "l40s", "epyc"], date(2026, 6, 9))
    assert "2026-03-10 for h100, l40s" in warning and "--prices FILE" in warning
    assert not pods.warnings(["h100"], date(2026, 6, 8)) and not aws.warnings(["h100"], date(2026, 11, 25))


@pytest.mark.parametrize(
    ("written", "doubt"),
    [
        ("2026-09", ""),  # 90 days after its last day
        ("2026-08", "more than 90 days ago"),
        ("2025", "more than 90 days ago"),
        ("2026", ""),
        ("undated, read 2026-03-10", "more than 90 days ago"),
        ("2026-12-30", "in the future"),
        ("2026-13-01", "no date"),
        ("at launch", "no date"),
        ("contract 20251", "no date"),
    ],
)
def test_any_way_to_write_a_date_is_read_or_said_to_be_none(written: str, doubt: str) -> None:
    market = prices.Prices(name="mine", entries={"h100": prices.Price(2.0, "a test", written)})
    found = market.warnings(["h100"], date(2026, 12, 29))
    assert [doubt in line and written in line for line in found] == [True] * bool(doubt)


def test_prices_are_told_briefly() -> None:
    """Every price and its date, within two lines of a terminal; sources are in the description."""
    for name in prices.names():
        market = prices.load(name)
        kinds = list(market.entries)[:2]
        told = market.brief(kinds)
        assert len(told) <= 160, told
        assert all(f"{kind} ${market.entries[kind].usd:,.2f}" in told for kind in kinds)
        assert all(market.entries[kind].date in told for kind in kinds)


def test_a_market_is_never_completed_from_another() -> None:
    runpod, own = prices.load("runpod"), prices.load("own")
    with pytest.raises(ConfigError, match=r"market runpod has no price for h100.*not mixed\. Give --prices aws or "):
        runpod.usd_per_hour(KINDS["h100"])
    with pytest.raises(ConfigError, match=r"no price for epyc.*No market of the package prices epyc"):
        own.usd_per_hour(KINDS["epyc"])


def test_the_remedy_names_exactly_the_markets_that_price_every_kind() -> None:
    for kinds in (["h100", "h20"], ["a100-80g", "h100"], ["h100", "rtx3090"]):
        for name in prices.names():
            market = prices.load(name)
            if all(map(market.lists, kinds)):
                market.require(kinds)
                continue
            with pytest.raises(ConfigError) as refused:
                market.require(kinds)
            offered = set(re.findall(r"--prices ([a-z]+)", str(refused.value)))
            assert offered == {one for one in prices.names() if prices.load(one).entries.keys() >= set(kinds)}


def test_what_prices_include_and_where_their_sources_are(tmp_path: Path) -> None:
    """The documentation has the sources of the package's markets alone."""
    file = tmp_path / "mine.toml"
    file.write_text("[kinds.h100]\nusd_per_hour = 2\nsource = 'a test'\ndate = '2026-11'\n")
    assert prices.load(str(file)).inclusion == "Included: unknown, since the file has no includes."
    file.write_text("includes = 'hosts'\n" + file.read_text())
    assert prices.load(str(file)).inclusion == "Included: hosts."
    assert re.fullmatch(r"Included: .*\. Sources: docs/cost-model.md, Money\. .*", prices.load("aws").inclusion)


def test_a_file_of_one_s_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[kinds.A100]\nusd_per_hour = 1.5\nsource = "my contract"\ndate = 2026-11-01\n')
    market = prices.load(str(file))
    assert market.usd_per_hour(KINDS["a100-80g"]) == 1.5
    assert market.name == str(file)  # as --prices takes it again
    assert "mine" in market.describe(["a100-80g"]) and "my contract; 2026-11-01" in market.describe(["a100-80g"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prices"),
        ("[kinds.h100]\nusd_per_hour = 2\n", r"\[kinds.h100\] lacks source and date"),
        ("[kinds.h100]\nusd_per_hour = -2\nsource = 'x'\ndate = 'y'\n", "usd_per_hour is -2; give a number"),
        ("[kinds.h100]\nusd = 2\nsource = 'x'\ndate = 'y'\n", "need years and usd_per_kwh"),
        ("[kinds.h100]\nusd = 2\n[kinds.h20]\nusd_per_hour = 3\n", "give each in a file of its own"),
        ("[kinds.h100]\nrent = 2\n", "unknown key 'rent'"),
        ("[h100]\nusd_per_hour = 2\n", "unknown key 'h100'"),
        ("[kinds", "not TOML"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        prices.load(str(tmp_path / "mine.toml"))


def test_a_market_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"'azure' is not a market \(aws, gcp, own, paper, pods, runpod\)"):
        prices.load("azure")
