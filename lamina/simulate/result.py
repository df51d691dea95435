"""What a simulation gives: metrics of every request, use of the pools, and what they come to."""

import csv
import enum
import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamina import _native
from lamina.errors import ConfigError
from lamina.plan.gemm import Floats
from lamina.protocol.timeline import Span
from lamina.simulate.arrivals import Arrivals, Ints


class State(enum.Enum):
    """The one terminal state of a request."""

    FINISHED = "finished"
    ERROR = "error"  # a worker was lost
    REFUSED = "refused"  # can never be served, or came when nothing served any more


_STATES = tuple(State)
_NUMBERS = {state: number for number, state in enumerate(_STATES)}

BUSY = 0.8
"""Share of the time from which something is called the bottleneck for what it does or makes wait."""


class RequestLog:
    """Collects what becomes of requests, by their index among the arrivals, and every time between two tokens."""

    def __init__(self, arrivals: Arrivals) -> None:
        count = len(arrivals)
        self.arrivals = arrivals
        self.end_s: Floats = np.full(count, np.nan)
        self._state: NDArray[np.int8] = np.full(count, -1, np.int8)
        self._tokens = _native.TokenTimes(arrivals.output.tolist())
        self.ended = 0

    def draw(self, now_s: float, requests: Ints) -> list[int]:
        """A step has drawn a token for each of these. The last token of those at the places returned has come."""
        return self._tokens.draw(now_s, requests)

    @property
    def first_s(self) -> Floats:
        """When first tokens came; NaN where none has."""
        return self._tokens.first_s()

    @property
    def drawn(self) -> NDArray[np.int64]:
        """Tokens drawn."""
        return self._tokens.drawn()

    @property
    def longest_gap_s(self) -> Floats:
        """The longest times between two tokens; NaN where there are no two."""
        return self._tokens.longest_gap_s()

    @property
    def gaps(self) -> tuple[Floats, NDArray[np.int64]]:
        """Times between two tokens of a request, with how many there were: not sorted, and some several times."""
        return self._tokens.gaps()

    def end(self, index: int, state: State, now_s: float) -> None:
        """A request has come to its end."""
        self.end_s[index] = now_s
        self._state[index] = _NUMBERS[state]
        self.ended += 1

    @property
    def states(self) -> list[State]:
        """By request. All must have ended."""
        return [_STATES[number] for number in self._state.tolist()]

    def count(self, state: State) -> int:
        """Requests that ended so."""
        return int((self._state == _NUMBERS[state]).sum())

    @property
    def finished(self) -> NDArray[np.bool_]:
        """Which requests have finished."""
        return np.asarray(self._state == _NUMBERS[State.FINISHED])


@dataclass(frozen=True)
class PoolUse:
    """How busy one pool was: shares of the time simulated, mean over its workers and that of the busiest.

    Attributes:
        network: of its workers' network cards, the busier direction.
    """

    name: str
    kind: str
    workers: int
    busy: float
    busiest: float
    network: float


@dataclass
class Decisions:
    """What the engine's decisions cost on the machine that simulated: seconds of CPU time.

    Attributes:
        steps, rows: planned. seconds: by decision.
    """

    steps: int = 0
    rows: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Percentiles:
    """Of some quantity, in seconds; NaN where there is none."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """One simulation.

    Attributes:
        system: what was simulated. log: what became of every request.
        seconds: from the first arrival to the last end. pools: how busy they were.
        usd_per_hour: of all pools. queued: share of the time in which requests waited to be admitted; refused: in which
            they did since the first of them had no room, in KV slots or among ``max_num_seqs``.
        decisions: of the engine, in CPU time: the one part that differs from run to run.
        preempted: sequences that lost their KV and were computed anew.
        spans: what workers did when, by worker, as far as recorded.
    """

    system: str
    log: RequestLog
    seconds: float
    pools: tuple[PoolUse, ...]
    usd_per_hour: float
    queued: float
    refused: float
    steps: int
    preempted: int = 0
    decisions: Decisions | None = field(default=None, compare=False)
    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Drawn for requests, whatever became of them."""
        return int(self.log.drawn.sum())

    @property
    def tokens_s(self) -> float:
        """Tokens drawn per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def requests_s(self) -> float:
        """Requests finished per second."""
        return self.log.count(State.FINISHED) / self.seconds if self.seconds else 0.0

    @property
    def ttft_s(self) -> Percentiles:
        """From a request's arrival to its first token."""
        waits = self.log.first_s - self.log.arrivals.arrival_s
        return _percentiles(waits[~np.isnan(waits)])

    @property
    def tbt_s(self) -> Percentiles:
        """Between two tokens of a request, every pair counted."""
        values, counts = self.log.gaps
        if not len(values):
            return Percentiles(np.nan, np.nan, np.nan)
        order = values.argsort()
        counts = np.cumsum(counts[order])
        at = [int(np.searchsorted(counts, share * counts[-1])) for share in (0.5, 0.9, 0.99)]
        return Percentiles(*(float(values[order][place]) for place in at))

    @property
    def usd_per_million_out(self) -> float:
        """What the pools cost while a million tokens are drawn; all of their time is charged to them."""
        return self.usd_per_hour / 3600 * self.seconds / self.tokens * 1e6 if self.tokens else float("inf")

    @property
    def bottleneck(self) -> str:
        """The pool whose workers or network cards are busiest, if any worked. Where none is busy and requests wait to
        be admitted all the same: KV slots or ``max_num_seqs`` if there was no room, else the lanes, each of which waits
        for one pool and then for the other."""
        uses = [(pool.busiest, f"{pool.name} workers") for pool in self.pools]
        uses += [(pool.network, f"network of {pool.name} workers") for pool in self.pools]
        share, what = max(uses)
        if share < BUSY and self.refused > BUSY:
            return "room to admit requests (KV slots or max_num_seqs)"
        if share < BUSY and self.queued > BUSY:
            return "steps of a lane, which wait for one pool and then for the other"
        return what if share else "nothing"

    def summary(self) -> dict[str, Any]:
        """Everything but the requests, as JSON takes it, None where there is no number; the same for the same seed."""
        return {
            "system": self.system,
            "requests": {state.value: self.log.count(state) for state in State},
            "seconds": self.seconds,
            "tokens": self.tokens,
            "tokens_s": self.tokens_s,
            "requests_s": self.requests_s,
            "ttft_s": {share: _finite(seconds) for share, seconds in vars(self.ttft_s).items()},
            "tbt_s": {share: _finite(seconds) for share, seconds in vars(self.tbt_s).items()},
            "pools": [vars(pool) for pool in self.pools],
            "bottleneck": self.bottleneck,
            "queued": self.queued,
            "refused": self.refused,
            "usd_per_hour": self.usd_per_hour,
            "usd_per_million_out": _finite(self.usd_per_million_out),
            "steps": self.steps,
            "preempted": self.preempted,
        }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _percentiles(values: Floats) -> Percentiles:
    if not len(values):
        return Percentiles(np.nan, np.nan, np.nan)
    return Percentiles(*(float(value) for value in np.quantile(values, (0.5, 0.9, 0.99))))


def write_requests(file: Path, log: RequestLog) -> None:
    """Write one row for every request, seconds and tokens, to a .csv or .parquet file; nothing where there is no value.

    Raises:
        ConfigError: the file's name ends otherwise, or pyarrow, which writes Parquet, is not installed.
    """
    check_requests_file(file)
    arrivals = log.arrivals
    columns = {
        "arrival_s": arrivals.arrival_s,
        "prompt": arrivals.prompt,
        "output": arrivals.output,
        "drawn": log.drawn,
        "first_token_s": log.first_s,
        "end_s": log.end_s,
        "longest_gap_s": log.longest_gap_s,
    }
    states = [state.value for state in log.states]
    if file.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        arrays = {name: pyarrow.array(column, from_pandas=True) for name, column in columns.items()}  # NaN is null
        parquet.write_table(pyarrow.table({**arrays, "state": states}), file)
        return
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow([*columns, "state"])
        for row in zip(*(column.tolist() for column in columns.values()), states, strict=True):
            writer.writerow(["" if isinstance(value, float) and math.isnan(value) else value for value in row])


def check_requests_file(file: Path) -> None:
    """Refuse a file that ``write_requests`` could not write. Raises as that does."""
    if file.suffix not in (".csv", ".parquet"):
        raise ConfigError(f"{file} is neither .csv nor .parquet; name the file of requests so")
    if file.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError("Parquet needs pyarrow: pip install 'lamina[parquet]', or write a .csv file")
