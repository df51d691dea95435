"""The profile store: fits of the cost model with the samples they come from, in SQLite.

``profiles.sqlite`` beside this file comes with the package and is only read; ``python -m lamina.profiling.fit`` writes it or
any other file. One fit has a name (what it predicts) and the kind it was measured on; a kind without a fit of its own
is served by the first one stored, with its own catalogue entry.

Tables: ``fits`` (parameters as JSON, error summary, where the samples came from) and ``samples`` (what was measured
and what the fit says of it, in whole nanoseconds: the residuals).
"""

import json
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamina.errors import ConfigError

PACKAGED = Path(__file__).parent / "profiles.sqlite"

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
    """One measurement and its prediction. ``size`` counts token rows, or bytes for transfers."""

    operator: str
    size: int
    devices: int
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative: predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Fit:
    """Parameters of one part of the cost model, with the errors on the samples it was fitted to."""

    name: str
    kind: str
    source: str
    parameters: Mapping[str, Any]
    median_error: float
    p95_error: float


class ProfileStore:
    """Fits and samples in one SQLite file."""

    def __init__(self, file: Path = PACKAGED) -> None:
        self.file = file

    @classmethod
    def beside(cls, hardware: Path | None) -> "ProfileStore | None":
        """What ``lamina plan --measure`` stored beside a hardware file, if it wrote this one."""
        store = cls(hardware.with_suffix(".sqlite")) if hardware else None
        return store if store and store.file.is_file() else None

    def fit(self, name: str, kind: str) -> Fit:
        """The fit called ``name`` for ``kind``, or else the first one made on another kind.

        Raises:
            ConfigError: the store has none, or is no profile store.
        """
        query = (
            "SELECT name, kind, source, parameters, median_error, p95_error FROM fits WHERE name = ? "
            "ORDER BY kind = ? DESC, id LIMIT 1"
        )
        rows = self._read(query, (name, kind))
        if not rows:
            raise ConfigError(
                f"the profile store {self.file} has no fit {name!r}; make it with python -m lamina.profiling.fit"
            )
        stored = rows[0]
        return Fit(stored[0], stored[1], stored[2], json.loads(stored[3]), stored[4], stored[5])

    def own_fit(self, name: str, kind: str) -> Fit | None:
        """The fit called ``name`` that was made on ``kind`` itself, if there is one. Raises ConfigError as ``fit``."""
        known = self._read("SELECT kind FROM fits WHERE name = ? AND kind = ?", (name, kind))
        return self.fit(name, kind) if known else None

    def samples(self, name: str, kind: str) -> list[Sample]:
        """The samples of a fit, in the order they were written."""
        query = (
            "SELECT operator, size, devices, measured_ns, predicted_ns FROM samples "
            "WHERE fit = (SELECT id FROM fits WHERE name = ? AND kind = ?) ORDER BY rowid"
        )
        return [Sample(row[0], row[1], row[2], row[3] / 1e9, row[4] / 1e9) for row in self._read(query, (name, kind))]

    def write(self, fit: Fit, samples: Iterable[Sample]) -> None:
        """Store a fit with its samples in place of an earlier one of the same name and kind."""
        with closing(sqlite3.connect(self.file)) as connection, connection:
            connection.executescript(_SCHEMA)
            same = "SELECT id FROM fits WHERE name = ? AND kind = ?"
            connection.execute(f"DELETE FROM samples WHERE fit = ({same})", (fit.name, fit.kind))
            connection.execute("DELETE FROM fits WHERE name = ? AND kind = ?", (fit.name, fit.kind))
            written = connection.execute(
                "INSERT INTO fits (name, kind, source, parameters, median_error, p95_error) VALUES (?, ?, ?, ?, ?, ?)",
                (fit.name, fit.kind, fit.source, json.dumps(dict(fit.parameters)), fit.median_error, fit.p95_error),
            )
            connection.executemany(
                "INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?)",
                [
                    (
                        written.lastrowid,
                        s.operator,
                        s.size,
                        s.devices,
                        round(s.measured_s * 1e9),
                        round(s.predicted_s * 1e9),
                    )
                    for s in samples
                ],
            )

    def _read(self, query: str, values: tuple[str, ...]) -> list[tuple[Any, ...]]:
        if not self.file.is_file():
            raise ConfigError(f"there is no profile store {self.file}; make one with python -m lamina.profiling.fit")
        try:
            with closing(sqlite3.connect(f"{self.file.resolve().as_uri()}?mode=ro", uri=True)) as connection:
                return connection.execute(query, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"{self.file} is no profile store: {error}") from error
