"""The hardware catalogue: performance of one device of each kind, with sources. ``prices`` has what they cost.

``hardware.toml`` in this directory comes with the package; a user's file of the same format adds kinds and replaces
single values. All quantities here are in SI units: FLOP/s, bytes, bytes/s, seconds.
"""

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lamina.cluster.pool import CPU, GPUS, near, parse
from lamina.core.errors import ConfigError
from lamina.core.types import DType

CATALOGUE = Path(__file__).parent / "hardware.toml"
ALIASES = {"a100": "a100-80g"}
"""Names accepted in pools and users' files for one of several catalogue entries."""

_NUMBERS = {
    "processors": ("processors", 1.0),
    "bfloat16_tflops": ("", 1e12),
    "float16_tflops": ("", 1e12),
    "float32_tflops": ("", 1e12),
    "memory_gb_s": ("memory_bytes_s", 1e9),
    "memory_gib": ("memory_bytes", 2.0**30),
    "link_gb_s": ("link_bytes_s", 1e9),
    "nic_gb_s": ("nic_bytes_s", 1e9),
    "watts": ("watts", 1.0),
}
"""Numbers of an entry -> attribute of ``Hardware`` and unit; FLOP/s are by element type."""

_OPTIONAL = {
    "clock_ghz": ("clock_hz", 1e9),
    "cache_mib": ("cache_bytes", 2.0**20),
    "fp8_tflops": ("fp8_flops", 1e12),
    "product_share": ("product_share", 1.0),
}
_NAME = re.compile(r"[a-z0-9_-]+")  # as in the grammar of pools
_TEXTS = ("device", "link")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device of one kind.

    Attributes:
        kind: Name in a pool.
        device: Full name.
        link: Connection to peers in the same machine.
        processors: Units that each compute one tile of a matrix product at a time.
        clock_hz: Boost clock of the processors; infinity if it is not published.
        flops: Peak FLOP/s of dense matrix products by element type.
        fp8_flops: Peak FLOP/s with 8-bit floats; 0 if the device has no units for them.
        memory_bytes_s: Bandwidth of its memory.
        memory_bytes: Size of its memory.
        link_bytes_s: One-way bandwidth to peers in the machine.
        nic_bytes_s: One-way bandwidth to other machines.
        watts: Board power.
        cache_bytes: Size of the last-level cache; 0 if unknown, and then not modelled.
        like: Kind whose fits apply to this kind; empty for its own.
        product_share: Share of the peak that matrix products reach, where it was measured; 0: that of the fit.
        sources: Where the numbers come from.
    """

    kind: str
    device: str
    link: str
    processors: int
    flops: Mapping[DType, float] = field(hash=False)
    memory_bytes_s: float
    memory_bytes: float
    link_bytes_s: float
    nic_bytes_s: float
    watts: float
    clock_hz: float = math.inf
    cache_bytes: float = 0.0
    fp8_flops: float = 0.0
    like: str = ""
    product_share: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)


class Catalogue:
    """Hardware by kind."""

    def __init__(self, kinds: Mapping[str, Hardware]) -> None:
        self.kinds = dict(kinds)

    def __getitem__(self, kind: str) -> Hardware:
        """Return the entry of ``kind``. Raises ConfigError naming the nearest kinds."""
        name = ALIASES.get(kind.lower(), kind.lower())
        if name == CPU and name not in self.kinds:
            raise ConfigError(
                "cpu means this machine, which the catalogue has no figures for: measure it with lamina plan "
                "--measure cpu.toml and give --hardware cpu.toml, or name epyc or xeon"
            )
        if name in GPUS and name not in self.kinds:
            raise ConfigError(
                f"the hardware catalogue has no figures for {name} ({GPUS[name]}). It has: "
                f"{', '.join(sorted(self.kinds))}. To add {name}, describe it in a file given with --hardware FILE"
            )
        if name not in self.kinds:
            raise ConfigError(
                f"{kind!r} is not in the hardware catalogue{near(name, [*self.kinds, *ALIASES])} "
                f"Known: {', '.join(sorted(self.kinds))}. "
                "To add one, describe it in a file given with --hardware FILE"
            )
        return self.kinds[name]

    def pool(self, text: str, most: int) -> list[tuple[Hardware, int]]:
        """Parse a pool (``lamina.cluster.pool``): its hardware, with the most devices of each (``most`` by default).

        Raises ConfigError if the text is malformed or names a kind that is not in the catalogue.
        """
        known = dict.fromkeys([*self.kinds, *ALIASES, CPU, *GPUS])
        return [(self[entry.kind], entry.count) for entry in parse(text, known, most)]


def load(user_file: Path | None = None) -> Catalogue:
    """Return the packaged catalogue, with the values of ``user_file`` added or replaced.

    Raises ConfigError if the file is not TOML, or an entry has a missing, unknown or out-of-range value.
    """
    tables = _read(CATALOGUE)
    for name, table in (_read(user_file) if user_file else {}).items():
        if not isinstance(table, dict):
            raise ConfigError(f"{user_file}: {name!r} is outside a table; put [KIND] above it")
        if not isinstance(table.get("sources", {}), dict):
            raise ConfigError(
                f"{user_file}: sources of [{name}] is not a table; put [{name}.sources] above its entries"
            )
        kind = ALIASES.get(name.lower(), name.lower())
        if not _NAME.fullmatch(kind):
            raise ConfigError(f"{user_file}: invalid kind {name!r}; use letters, digits, - and _")
        known = tables.get(kind, {})
        sources = {**known.get("sources", {}), **table.get("sources", {})}
        tables[kind] = {**known, **table, "sources": sources}
    return Catalogue({kind: _entry(kind, table, user_file or CATALOGUE) for kind, table in tables.items()})


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"the hardware file {file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the hardware file {file} is not TOML: {error}") from error


def _entry(kind: str, table: Mapping[str, Any], file: Path) -> Hardware:
    allowed = (*_NUMBERS, *_TEXTS, *_OPTIONAL, "like", "sources")
    if unknown := [name for name in table if name not in allowed]:
        raise ConfigError(f"{file}: [{kind}] has the unknown key {unknown[0]!r}; known: {', '.join(allowed)}")
    if missing := [name for name in (*_NUMBERS, *_TEXTS) if name not in table]:
        raise ConfigError(f"{file}: [{kind}] lacks {', '.join(missing)}")
    given = {name: into for name, into in (_NUMBERS | _OPTIONAL).items() if name in table}
    numbers = {name: _number(kind, name, table[name], file) * unit for name, (_, unit) in given.items()}
    values: dict[str, Any] = {attribute: numbers[name] for name, (attribute, _) in given.items() if attribute}
    return Hardware(
        kind=kind,
        device=str(table["device"]),
        link=str(table["link"]),
        flops={dtype: numbers[f"{dtype.value}_tflops"] for dtype in DType},
        like=str(table.get("like", "")),
        sources=dict(table.get("sources", {})),
        **values | {"processors": int(values["processors"])},
    )


def _number(kind: str, name: str, value: object, file: Path) -> float:
    least = 0 if name == "watts" else 1 if name == "processors" else 1e-9
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e12:
        raise ConfigError(f"{file}: [{kind}] {name} is {value!r}; give a number from {least:g} to below 1e12")
    return float(value)
