"""Prices per hour of each kind of hardware in one market, with the source and date of every price.

A plan is priced in one market: a file of ``markets`` beside this module, or a user's file of that form. A market either
rents (``usd_per_hour`` of a kind) or sells (``usd``, spread over ``years``, plus electricity at ``usd_per_kwh`` for the
board power in the hardware catalogue). Prices of two markets are never mixed: a kind without a price is an error.
"""

import calendar
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from lamina.core.errors import ConfigError
from lamina.planning.plan.hardware import ALIASES, Hardware

_DATE = re.compile(r"(?<!\d)(\d{4})(?:-(\d{2})(?:-(\d{2}))?)?(?!\d)")
MARKETS = Path(__file__).parent / "markets"
DEFAULT = "pods"
"""Somebody who plans before renting rents; ``own`` is for devices that are bought."""

FRESH_DAYS = 90
"""Prices older than so many days are warned of."""

HOURS_PER_YEAR = 365 * 24

_OF_MARKET = ("market", "includes", "rdma", "years", "usd_per_kwh", "network_usd", "network", "kinds")
_OF_KIND = ("usd", "usd_per_hour", "source", "date")


@dataclass(frozen=True)
class Price:
    """US dollars of one device (per hour where the market rents), with source and date."""

    usd: float
    source: str
    date: str


@dataclass(frozen=True, kw_only=True)
class Prices:
    """One market.

    Attributes:
        name: Name, as given to ``load``.
        entries: Price by kind.
        market: Description of the market, for display.
        includes: What its prices cover, for display.
        rdma: Whether its machines have RDMA between them, which plans of two pools assume.
        years: Years over which a purchase is spread; None where the market rents.
        usd_per_kwh: Price of electricity, where the market sells.
        network_usd: Price of one worker's network, where the market sells.
        network: Description of this network and the source of its price.
    """

    name: str
    entries: Mapping[str, Price]
    market: str = ""
    includes: str = ""
    rdma: bool = True
    years: float | None = None
    usd_per_kwh: float = 0.0
    network_usd: float = 0.0
    network: str = ""

    @property
    def inclusion(self) -> str:
        """What the prices include and, of the package's markets, where their sources are."""
        sources = " Sources: docs/cost-model.md, Money. --prices FILE has yours." if self.name in names() else ""
        return f"Included: {self.includes}.{sources}"

    def lists(self, kind: str) -> bool:
        """Return whether the market has a price for a kind."""
        return kind in self.entries

    def warnings(self, kinds: Iterable[str], today: date) -> list[str]:
        """Return a warning for each date that is more than FRESH_DAYS ago, in the future, or not a date."""
        kinds_of: dict[str, list[str]] = {}
        for kind in dict.fromkeys(kinds):
            if kind in self.entries:
                kinds_of.setdefault(self.entries[kind].date, []).append(kind)
        return [
            f"The market {self.name} has prices dated {when} for {', '.join(own)}, {doubt}: compare them with today's, "
            "and give yours with --prices FILE."
            for when, own in kinds_of.items()
            if (doubt := _doubt(when, today))
        ]

    def usd_per_hour(self, hardware: Hardware, networked: bool = False) -> float:
        """Return the cost of an hour of one device, with its share of the network if ``networked``.

        Raises ConfigError if the market has no price for it; the error names the kinds that have one.
        """
        self.require([hardware.kind])
        usd = self.entries[hardware.kind].usd
        if self.years is None:
            return usd
        bought = usd + (self.network_usd if networked else 0.0)
        return bought / (self.years * HOURS_PER_YEAR) + hardware.watts / 1000 * self.usd_per_kwh

    def require(self, kinds: Iterable[str]) -> None:
        """Raise ConfigError if a kind has no price; the error names the markets that price all of them."""
        kinds = list(dict.fromkeys(kinds))
        missing = [kind for kind in kinds if kind not in self.entries]
        if not missing:
            return
        others = [f"--prices {name}" for name in names() if all(map(load(name).lists, kinds))]
        remedy = (
            f"Give {' or '.join(others)}, which price{'s' * (len(others) == 1)} {' and '.join(kinds)}"
            if others
            else f"No market of the package prices {' and '.join(kinds)}; {self.name} has {', '.join(self.entries)}. "
            "Name other hardware"
        )
        raise ConfigError(
            f"the market {self.name} has no price for {' and '.join(missing)}, and prices of two markets are not "
            f"mixed. {remedy}, or give --prices FILE with usd_per_hour, source and date in [kinds.KIND] for each of "
            "them"
        )

    def brief(self, kinds: Iterable[str]) -> str:
        """Return the market, with the price of each kind and the dates of the prices."""
        unit = "/h" if self.years is None else f" to buy, over {self.years:g} years"
        priced = {kind: self.entries[kind] for kind in dict.fromkeys(kinds) if kind in self.entries}
        dates = ", ".join(dict.fromkeys(price.date for price in priced.values()))
        listed = ", ".join(f"{kind} ${price.usd:,.2f}{unit}" for kind, price in priced.items())
        return f"{self.name} ({self.market}; {dates}): {listed}"

    def describe(self, kinds: Iterable[str]) -> str:
        """Return the market, and the price of each kind with source and date."""
        unit = "/h" if self.years is None else f" over {self.years:g} years, ${self.usd_per_kwh:g}/kWh"
        listed = "; ".join(
            f"{kind} ${price.usd:,.2f}{unit} ({price.source}; {price.date})"
            for kind in dict.fromkeys(kinds)
            if (price := self.entries.get(kind))
        )
        network = f"; ${self.network_usd:,.0f} of network for each worker of two pools" if self.network_usd else ""
        network += f" ({self.network})" if network and self.network else ""
        return f"{self.name} ({self.market}; included: {self.includes}{network}): {listed}"


def _doubt(text: str, today: date) -> str:
    """Return what is doubtful about the date of a price; empty if nothing is."""
    days = _days(text)
    if days is None:
        return "which is no date such as 2026-11-28"
    if days[0] > today:
        return "which is in the future"
    return f"more than {FRESH_DAYS} days ago" if (today - days[1]).days > FRESH_DAYS else ""


def _days(text: str) -> tuple[date, date] | None:
    """Return the first and the last day of the date in a text: a day, a month or a year. None if the text has no
    date."""
    if (found := _DATE.search(text)) is None:
        return None
    year, month, day = (int(part) if part else None for part in found.groups())
    try:
        first = date(year or 1, month or 1, day or 1)
        return first, first if day else date(first.year, month or 12, calendar.monthrange(first.year, month or 12)[1])
    except ValueError:
        return None


UNPRICED = Prices(name="none", entries={})
"""A market without prices, for questions that money has no part in."""


def names() -> list[str]:
    """Return the package's markets."""
    return sorted(file.stem for file in MARKETS.glob("*.toml"))


def load(text: str = DEFAULT) -> Prices:
    """Return the market called ``text``, or the market in the TOML file ``text``.

    Raises ConfigError if neither exists, or the file has a missing, unknown or out-of-range value.
    """
    file = MARKETS / f"{text}.toml" if text in names() else Path(text).expanduser()
    try:
        table = tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(
            f"{text!r} is not a market ({', '.join(names())}) and, as a file, cannot be read: {error.strerror}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prices {file} are not TOML: {error}") from error
    return _market(text, table, file)


def _market(name: str, table: Mapping[str, Any], file: Path) -> Prices:
    _check_keys(table, _OF_MARKET, f"{file}")
    kinds = table.get("kinds")
    if not isinstance(kinds, dict) or not kinds or not all(isinstance(entry, dict) for entry in kinds.values()):
        raise ConfigError(f"{file} has no prices; give tables such as [kinds.h100] with usd_per_hour, source and date")
    sells = {"usd" in entry for entry in kinds.values()}
    if len(sells) == 2:
        raise ConfigError(f"{file} has purchase prices (usd) and rents (usd_per_hour); give each in a file of its own")
    bought = sells == {True}
    if bought != ("years" in table and "usd_per_kwh" in table):
        raise ConfigError(f"{file}: purchase prices (usd) need years and usd_per_kwh, and rents have neither")
    return Prices(
        name=name,
        market=str(table.get("market", file.stem)),
        includes=str(table.get("includes", "unknown, since the file has no includes")),
        rdma=bool(table.get("rdma", True)),
        entries={ALIASES.get(kind.lower(), kind.lower()): _price(kind, entry, file) for kind, entry in kinds.items()},
        years=_number(table, "years", f"{file}", least=0.1) if bought else None,
        usd_per_kwh=_number(table, "usd_per_kwh", f"{file}") if bought else 0.0,
        network_usd=_number(table, "network_usd", f"{file}") if "network_usd" in table else 0.0,
        network=str(table.get("network", "")),
    )


def _price(kind: str, entry: Mapping[str, Any], file: Path) -> Price:
    where = f"{file}: [kinds.{kind}]"
    _check_keys(entry, _OF_KIND, where)
    if missing := [name for name in ("source", "date") if not entry.get(name)]:
        raise ConfigError(f"{where} lacks {' and '.join(missing)}: every price says where and when it is from")
    return Price(
        _number(entry, "usd" if "usd" in entry else "usd_per_hour", where), str(entry["source"]), str(entry["date"])
    )


def _check_keys(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    if unknown := [name for name in table if name not in known]:
        raise ConfigError(f"{where} has the unknown key {unknown[0]!r}; known: {', '.join(known)}")


def _number(table: Mapping[str, Any], name: str, where: str, least: float = 0.0) -> float:
    value = table.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e9:
        raise ConfigError(f"{where} {name} is {value!r}; give a number of at least {least:g}")
    return float(value)
