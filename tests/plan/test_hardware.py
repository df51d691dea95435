"""The catalogue, user files over it, and pools of its kinds."""

import re
from pathlib import Path

import pytest

from lamina.errors import ConfigError
from lamina.plan import hardware
from lamina.types import DType

KINDS = (
    "a100-40g a100-80g h100 h200 h20 a800 a40 l40s rtx3090 rtx4080 rtx4090 rtx5090 rx7900xtx arc-a770 tpu-v6e epyc xeon"
)


def test_every_kind_has_its_sources() -> None:
    catalogue = hardware.load()
    assert set(catalogue.kinds) == set(KINDS.split())
    for entry in catalogue.kinds.values():
        assert entry.sources["specification"] and entry.sources["price_usd"]
        assert (entry.rent_usd_per_hour is None) == ("price_usd_per_hour" not in entry.sources)
        for stated in entry.sources.values():  # a paper, a page, what it was derived from, or a plain word
            named = r"Lamina|Mnemosyne|LoongServe|Infinite-LLM|\.(com|co|net|top|io|ai)|that of|not sold|unconfirmed"
            assert re.search(named, stated), (entry.kind, stated)


def test_prices_of_the_papers() -> None:
    catalogue = hardware.load()
    # Lamina Table 1: dollars and GB; dollars per GB/s of the cards whose bandwidth it gives.
    table = {"a100-80g": (17500, 80), "h100": (36500, 80), "rtx3090": (1600, 24), "rx7900xtx": (1000, 24)}
    for kind, (dollars, capacity) in {**table, "arc-a770": (350, 16)}.items():
        assert (catalogue[kind].price_usd, catalogue[kind].memory_bytes) == (dollars, capacity * 1e9)
    per_bandwidth = {"h100": 10.90, "rtx3090": 1.71, "rx7900xtx": 1.04, "arc-a770": 0.63}
    for kind, dollars_per_gb_s in per_bandwidth.items():
        entry = catalogue[kind]
        assert entry.price_usd / entry.memory_bytes_s * 1e9 == pytest.approx(dollars_per_gb_s, abs=0.006)
    assert (catalogue["h100"].usd_per_hour, catalogue["h20"].usd_per_hour) == (11.06, 4.63)
    # Section 3.2: an RTX 4080 has 31.2% of an A100's FLOP/s.
    share = catalogue["rtx4080"].flops[DType.FLOAT16] / catalogue["a100"].flops[DType.FLOAT16]
    assert share == pytest.approx(0.312, abs=0.001)


def test_what_has_no_rent_is_charged_for_owning_it() -> None:
    entry = hardware.load()["rx7900xtx"]
    assert entry.usd_per_hour == pytest.approx(1000 / 26280 + 0.355 * 0.12)


def test_a_user_file_adds_and_replaces(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[h100]\nprice_usd_per_hour = 2.5\n[h100.sources]\nprice_usd_per_hour = "my contract"\n')
    entry = hardware.load(file)["h100"]
    assert (entry.usd_per_hour, entry.sources["price_usd_per_hour"]) == (2.5, "my contract")
    assert entry.memory_bytes_s == hardware.load()["h100"].memory_bytes_s
    assert "Table 1" in entry.sources["price_usd"]


def test_a_user_s_kinds_go_by_the_names_that_pools_have(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    known = hardware.load()["a100"]
    numbers = "".join(f"{name} = 7\n" for name in hardware._NUMBERS)
    file.write_text(f'[a100]\nprice_usd_per_hour = 1.5\n[MyCard]\ndevice = "x"\nlink = "y"\n{numbers}')
    catalogue = hardware.load(file)
    assert (catalogue["a100"].usd_per_hour, catalogue["a100-80g"].usd_per_hour) == (1.5, 1.5)
    assert catalogue["a100"].memory_bytes == known.memory_bytes
    assert [(entry.kind, most) for entry, most in catalogue.pool("MyCard:3", 8)] == [("mycard", 3)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[mine]\nprocessors = 4\n", r"\[mine\] lacks clock_ghz, "),
        ("[h100]\nmemory_gbs = 4\n", r"\[h100\] has the unknown key 'memory_gbs'; known:"),
        ("[h100]\nmemory_gb = -4\n", r"\[h100\] memory_gb is -4; give a number from 1e-09 to below 1e12"),
        ("[h100]\nprocessors = 0.5\n", "processors is 0.5; give a number from 1"),
        ("[h100]\nsources = 'me'\n", r"sources of \[h100\] is not a table"),
        ("['my card']\nprocessors = 4\n", "invalid kind 'my card'; use letters"),
        ("[h100]\nmemory_gb = 'lots'\n", r"memory_gb is 'lots'"),
        ("[h100]\nmemory_gb = nan\n", r"memory_gb is nan"),
        ("h100 = 4\n", "outside a table"),
        ("[h100\n", "is not TOML"),
    ],
)
def test_a_broken_user_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        hardware.load(file)


def test_unknown_kinds_are_refused_with_the_nearest() -> None:
    catalogue = hardware.load()
    with pytest.raises(ConfigError, match=r"'h10' is not in the hardware catalogue; did you mean h100 or h20"):
        catalogue["h10"]
    with pytest.raises(ConfigError, match="unknown kind 'rtx309'; did you mean rtx3090"):
        catalogue.pool("h100:2,rtx309", 8)
    with pytest.raises(ConfigError, match="cannot be read"):
        hardware.load(Path("/nowhere/mine.toml"))


def test_pools_take_counts_or_the_most() -> None:
    catalogue = hardware.load()
    assert [(entry.kind, most) for entry, most in catalogue.pool("a100:2,rtx3090", 8)] == [
        ("a100-80g", 2),
        ("rtx3090", 8),
    ]
