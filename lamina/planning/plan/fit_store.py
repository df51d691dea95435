"""Stores fits of the cost model: the package's in a text file, a user's own in SQLite with their samples.

``fits.json`` in this directory comes with the package; ``python -m bench.cost.fit`` writes it. A kind without a fit
uses the file's first fit, with the kind's own catalogue entry. A user's store has the tables ``fits`` (parameters as
JSON, error summary, source of the samples) and ``samples`` (measured and predicted times in whole nanoseconds).
"""

import json
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamina.core.errors import ConfigError

PACKAGED = Path(__file__).parent / "fits.json"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS fits (
    id INTEGER PRIMARY KEY, name TEXT, kind TEXT, source TEXT, parameters TEXT, median_error REAL, p95_error REAL,
    UNIQUE (name, kind));
CREATE TABLE IF NOT EXISTS samples (
    fit INTEGER REFERENCES fits (id), operator TEXT, size INTEGER, devices INTEGER,
    measured_ns INTEGER, predicted_ns INTEGER);
"""


@dataclass(frozen=True)
class Sample:
    """One measurement and its prediction. ``size`` is in token rows, or in bytes for transfers."""

    operator: str
    size: int
    devices: int
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative error: predicted / measured - 1."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Fit:
    """Fitted parameters of one part of the cost model, with the errors on the samples."""

    name: str
    kind: str
    source: str
    parameters: Mapping[str, Any]
    median_error: float
    p95_error: float


def packaged_fits() -> list[Fit]:
    """Return all fits of the package."""
    return [Fit(**stored) for stored in json.loads(PACKAGED.read_text())]


def packaged_fit(name: str, kind: str) -> Fit:
    """Return the package's fit of a part of the cost model for ``kind``, else its first fit for another kind."""
    fits = [fit for fit in packaged_fits() if fit.name == name]
    return next((fit for fit in fits if fit.kind == kind), fits[0])


class ProfileStore:
    """A user's fits and their samples in one SQLite file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @classmethod
    def beside(cls, hardware: Path | None) -> "ProfileStore | None":
        """Return the store that ``lamina plan --measure`` wrote next to a hardware file; None if it does not exist."""
        store = cls(hardware.with_suffix(".sqlite")) if hardware else None
        return store if store and store.file.is_file() else None

    def fit(self, name: str, kind: str) -> Fit | None:
        """Return the fit called ``name`` for ``kind``, None if the store has none.

        Raises:
            ConfigError: the file does not exist or is not a profile store.
        """
        query = "SELECT source, parameters, median_error, p95_error FROM fits WHERE name = ? AND kind = ?"
        stored = [Fit(name, kind, row[0], json.loads(row[1]), *row[2:]) for row in self._read(query, (name, kind))]
        return stored[0] if stored else None

    def samples(self, name: str, kind: str) -> list[Sample]:
        """Return the samples of a fit, in the order they were written."""
        query = (
            "SELECT operator, size, devices, measured_ns, predicted_ns FROM samples "
            "WHERE fit = (SELECT id FROM fits WHERE name = ? AND kind = ?) ORDER BY rowid"
        )
        return [Sample(row[0], row[1], row[2], row[3] / 1e9, row[4] / 1e9) for row in self._read(query, (name, kind))]

    def save_fit(self, fit: Fit, samples: Iterable[Sample]) -> None:
        """Store a fit with its samples, replacing an earlier one of the same name and kind."""
        key = (fit.name, fit.kind)
        errors = (fit.median_error, fit.p95_error)
        rows = [(s.operator, s.size, s.devices, round(s.measured_s * 1e9), round(s.predicted_s * 1e9)) for s in samples]
        with closing(sqlite3.connect(self.file)) as connection, connection:
            connection.executescript(_SCHEMA)
            same = "SELECT id FROM fits WHERE name = ? AND kind = ?"
            connection.execute(f"DELETE FROM samples WHERE fit = ({same})", key)
            connection.execute("DELETE FROM fits WHERE name = ? AND kind = ?", key)
            written = connection.execute(
                "INSERT INTO fits (name, kind, source, parameters, median_error, p95_error) VALUES (?, ?, ?, ?, ?, ?)",
                (*key, fit.source, json.dumps(dict(fit.parameters)), *errors),
            )
            stored = [(written.lastrowid, *row) for row in rows]
            connection.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?)", stored)

    def _read(self, query: str, values: tuple[str, ...]) -> list[tuple[Any, ...]]:
        if not self.file.is_file():
            raise ConfigError(f"the profile store {self.file} does not exist; create it with lamina plan --measure")
        try:
            with closing(sqlite3.connect(f"{self.file.resolve().as_uri()}?mode=ro", uri=True)) as connection:
                return connection.execute(query, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"{self.file} is not a profile store: {error}") from error
