"""The hardware catalogue: what one device of each kind offers and what it costs, with sources.

``hardware.toml`` beside this file comes with the package; a user's file of the same form adds kinds and replaces single
values. All quantities here are in SI units: FLOP/s, bytes, bytes/s, seconds, US dollars.
"""

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lamina.cluster.pool import CPU, GPUS, parse
from lamina.errors import ConfigError
from lamina.types import DType

CATALOGUE = Path(__file__).parent / "hardware.toml"
ALIASES = {"a100": "a100-80g"}
"""Names of pools, and of tables in a user's file, that stand for one of several catalogue entries."""

OWNED_HOURS = 3 * 365 * 24
DOLLARS_PER_KWH = 0.12

_NUMBERS = {
    "processors": 1.0,
    "clock_ghz": 1e9,
    "bfloat16_tflops": 1e12,
    "float16_tflops": 1e12,
    "float32_tflops": 1e12,
    "memory_gb_s": 1e9,
    "memory_gb": 1e9,
    "link_gb_s": 1e9,
    "nic_gb_s": 1e9,
    "watts": 1.0,
    "price_usd": 1.0,
}
_NAME = re.compile(r"[a-z0-9_-]+")  # as in a pool
_TEXTS = ("device", "link")
_OPTIONAL = ("price_usd_per_hour",)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device of one kind.

    Attributes:
        kind: as in a pool. device: what it is. link: how it reaches peers in its machine.
        processors: units that work on one tile of a matrix product at a time. clock_hz: their boost clock.
        flops: peak FLOP/s of dense matrix products by element type.
        memory_bytes_s, memory_bytes: of its own memory.
        link_bytes_s, nic_bytes_s: one direction, to peers in the machine and to other machines.
        price_usd: to buy; 0 where it is not sold. rent_usd_per_hour: as stated, or None.
        sources: where the numbers came from.
    """

    kind: str
    device: str
    link: str
    processors: int
    clock_hz: float
    flops: Mapping[DType, float] = field(hash=False)
    memory_bytes_s: float
    memory_bytes: float
    link_bytes_s: float
    nic_bytes_s: float
    watts: float
    price_usd: float
    rent_usd_per_hour: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)

    @property
    def usd_per_hour(self) -> float:
        """What an hour costs: the rent, or owning it for three years of hours and its electricity."""
        return self.owned_usd_per_hour if self.rent_usd_per_hour is None else self.rent_usd_per_hour

    @property
    def owned_usd_per_hour(self) -> float:
        """What an hour of owning it for three years costs, with electricity at full power."""
        return self.price_usd / OWNED_HOURS + self.watts / 1000 * DOLLARS_PER_KWH

    def require_sold(self) -> None:
        """Raises ConfigError for a kind that can be rented only: owning it has no cost to compare."""
        if not self.price_usd and self.rent_usd_per_hour is not None:
            raise ConfigError(
                f"{self.kind} has no price to buy (price_usd is 0) but ${self.rent_usd_per_hour:.2f} an hour of rent; "
                "leave --owned out, or give price_usd in a file with --hardware"
            )


class Catalogue:
    """Kinds by name."""

    def __init__(self, kinds: Mapping[str, Hardware]) -> None:
        self.kinds = dict(kinds)

    def __getitem__(self, kind: str) -> Hardware:
        """The entry of ``kind``. Raises ConfigError naming the nearest kinds."""
        name = ALIASES.get(kind.lower(), kind.lower())
        if name == CPU and name not in self.kinds:
            raise ConfigError(
                "a cpu is whatever machine this is, so the catalogue has no figures for it: measure them with "
                "lamina plan --measure cpu.toml and give --hardware cpu.toml, or name epyc or xeon"
            )
        if name in GPUS and name not in self.kinds:
            raise ConfigError(
                f"the hardware catalogue has no figures for {name} ({GPUS[name]}). It has: "
                f"{', '.join(sorted(self.kinds))}. Describe {name} in a file and give it with --hardware FILE"
            )
        if name not in self.kinds:
            known = [*self.kinds, *ALIASES]
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else "."
            raise ConfigError(
                f"{kind!r} is no kind of the hardware catalogue{hint} Known: {', '.join(sorted(self.kinds))}. "
                "Describe another one in a file and give it with --hardware FILE"
            )
        return self.kinds[name]

    def pool(self, text: str, most: int) -> list[tuple[Hardware, int]]:
        """Entries of a pool as typed (``lamina.cluster.pool``), with how many of each there may be (else ``most``).

        Raises:
            ConfigError: the text is malformed or names a kind that the catalogue does not have.
        """
        known = dict.fromkeys([*self.kinds, *ALIASES, CPU, *GPUS])
        return [(self[entry.kind], entry.count) for entry in parse(text, known, most)]


def load(user_file: Path | None = None) -> Catalogue:
    """The catalogue that comes with the package, with ``user_file``'s values over it.

    Raises:
        ConfigError: the file is not TOML, or an entry lacks a value, has an unknown one or one out of range.
    """
    tables = _read(CATALOGUE)
    for name, table in (_read(user_file) if user_file else {}).items():
        if not isinstance(table, dict):
            raise ConfigError(f"{user_file} has the value {name!r} outside a table; write [kind] above it")
        if not isinstance(table.get("sources", {}), dict):
            raise ConfigError(f"{user_file}: [{name}] has sources that are no table; write [{name}.sources] above them")
        kind = ALIASES.get(name.lower(), name.lower())
        if not _NAME.fullmatch(kind):
            raise ConfigError(f"{user_file} has a kind {name!r}; name it by letters, digits, - and _")
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
    allowed = (*_NUMBERS, *_TEXTS, *_OPTIONAL, "sources")
    if unknown := [name for name in table if name not in allowed]:
        raise ConfigError(f"{file}: [{kind}] has {unknown[0]!r}; known are {', '.join(allowed)}")
    if missing := [name for name in (*_NUMBERS, *_TEXTS) if name not in table]:
        raise ConfigError(f"{file}: [{kind}] lacks {', '.join(missing)}")
    value = {name: _number(kind, name, table[name], file) * unit for name, unit in _NUMBERS.items()}
    rent = table.get("price_usd_per_hour")
    return Hardware(
        kind=kind,
        device=str(table["device"]),
        link=str(table["link"]),
        processors=int(value["processors"]),
        clock_hz=value["clock_ghz"],
        flops={dtype: value[f"{dtype.value}_tflops"] for dtype in DType},
        memory_bytes_s=value["memory_gb_s"],
        memory_bytes=value["memory_gb"],
        link_bytes_s=value["link_gb_s"],
        nic_bytes_s=value["nic_gb_s"],
        watts=value["watts"],
        price_usd=value["price_usd"],
        rent_usd_per_hour=None if rent is None else _number(kind, "price_usd_per_hour", rent, file),
        sources=dict(table.get("sources", {})),
    )


def _number(kind: str, name: str, value: object, file: Path) -> float:
    least = 0 if name.startswith("price") or name == "watts" else 1 if name == "processors" else 1e-9
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e12:
        raise ConfigError(f"{file}: [{kind}] {name} is {value!r}; give a number from {least:g} to below 1e12")
    return float(value)
