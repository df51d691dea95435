"""The catalogue, user files over it, and pools of its kinds."""

import math
import re
from pathlib import Path

import pytest

from lamina.core.errors import ConfigError
from lamina.core.types import DType
from lamina.planning.plan import hardware

KINDS = (
    "a100-40g a100-80g h100 h200 b200 gb200 mi300x mi355x l4 h20 a800 a40 l40s rtx3090 rtx4080 rtx4090 rtx5090 "
    "rtxpro6000 rx7900xtx arc-a770 tpu-v6e turin granite-rapids epyc xeon"
)


def test_every_kind_has_its_sources() -> None:
    catalogue = hardware.load()
    assert set(catalogue.kinds) == set(KINDS.split())
    for entry in catalogue.kinds.values():
        for stated in entry.sources.values():  # a paper, a page, what it was derived from, or a plain word
            named = r"Lamina|Mnemosyne|LoongServe|Infinite-LLM|\.(com|co|net|top|io|ai)|unconfirmed"
            assert re.search(named, stated), (entry.kind, stated)


def test_figures_of_a_kind_agree_with_each_other() -> None:
    """Capacities are of binary parts; peaks are what so many processors do at the clock, in whole powers of two."""
    kinds = hardware.load().kinds
    assert kinds["a100-80g"].memory_bytes == 80 * 2**30 and kinds["rtx3090"].memory_bytes == 24 * 2**30
    for kind in ("a100-80g", "a800", "h100", "h200", "h20", "a40", "rtx3090", "rtx4090", "xeon"):
        entry = kinds[kind]
        lanes = entry.flops[DType.FLOAT32] / entry.processors / entry.clock_hz
        tensor = entry.flops[DType.BFLOAT16] / entry.processors / entry.clock_hz
        for per_clock in (lanes, tensor):  # an H100 has a clock for tensor products and a higher one for the rest
            assert abs(math.log2(per_clock) - round(math.log2(per_clock))) < 0.13, (kind, per_clock)


def test_ratios_of_the_papers() -> None:
    catalogue = hardware.load()
    # Section 3.2: an RTX 4080 has 31.2% of an A100's FLOP/s.
    share = catalogue["rtx4080"].flops[DType.FLOAT16] / catalogue["a100"].flops[DType.FLOAT16]
    assert share == pytest.approx(0.312, abs=0.001)


def test_a_user_file_adds_and_replaces(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[h100]\nwatts = 500\n[h100.sources]\nwatts = "capped"\n')
    entry = hardware.load(file)["h100"]
    assert (entry.watts, entry.sources["watts"]) == (500, "capped")
    assert entry.memory_bytes_s == hardware.load()["h100"].memory_bytes_s
    assert "glennklockwood" in entry.sources["specification"]


def test_a_user_s_kinds_go_by_the_names_that_pools_have(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    known = hardware.load()["a100"]
    numbers = "".join(f"{name} = 7\n" for name in hardware._NUMBERS)
    file.write_text(f'[a100]\nwatts = 300\n[MyCard]\ndevice = "x"\nlink = "y"\n{numbers}')
    catalogue = hardware.load(file)
    assert (catalogue["a100"].watts, catalogue["a100-80g"].watts) == (300, 300)
    assert catalogue["mycard"].clock_hz == math.inf
    assert catalogue["a100"].memory_bytes == known.memory_bytes
    assert [(entry.kind, most) for entry, most in catalogue.pool("MyCard:3", 8)] == [("mycard", 3)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[mine]\nprocessors = 4\n", r"\[mine\] lacks bfloat16_tflops, "),
        ("[h100]\nmemory_gb = 4\n", r"\[h100\] has the unknown key 'memory_gb'; known:.*memory_gib"),
        ("[h100]\nmemory_gib = -4\n", r"\[h100\] memory_gib is -4; give a number from 1e-09 to below 1e12"),
        ("[h100]\nprocessors = 0.5\n", "processors is 0.5; give a number from 1"),
        ("[h100]\nsources = 'me'\n", r"sources of \[h100\] is not a table"),
        ("['my card']\nprocessors = 4\n", "invalid kind 'my card'; use letters"),
        ("[h100]\nmemory_gib = 'lots'\n", r"memory_gib is 'lots'"),
        ("[h100]\nmemory_gib = nan\n", r"memory_gib is nan"),
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
