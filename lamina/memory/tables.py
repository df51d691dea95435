"""What the steps of a memory worker attend to, as planned."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lamina.core.steps import StepPlan
from lamina.dataplane.wire import MessageRows, Piece, SegmentKey, SegmentRows
from lamina.memory.device.base import Array, Table
from lamina.memory.watermarks import ALONE, ChunkOrder


def appended_rows(rows: MessageRows, pieces: tuple[Piece, ...], key: Callable[[SegmentRows], SegmentKey]) -> list[int]:
    """Return, for each of ``rows.attends``, the row of the message's k and v that belongs to its only query; -1 if none
    does.

    Empty unless the message is sent whole and every row of its k and v belongs to such a query: as in decode steps.
    """
    if len(pieces) > 1 or not rows.kept or any(tokens != 1 for _, tokens in rows.kept):
        return []
    places = {segment: place for place, (segment, _) in enumerate(rows.kept)}
    own = [each.rows == 1 and each.kv_stop == each.start + 1 for each in rows.attends]
    found = [places.pop(key(each), -1) if last else -1 for each, last in zip(rows.attends, own, strict=True)]
    return [] if places else found


@dataclass(frozen=True)
class Attended:
    """What query rows [start, stop) of a piece attend to. Those of parts of the heads with slopes of their own are
    apart."""

    start: int
    stop: int
    part: int
    table: Table


@dataclass(frozen=True)
class Further:
    """What some query rows of a piece attend to besides: tokens of one more segment of their sequences.

    ``rows`` int64 [R] index the piece's, ``sent`` are the same on the device; ``tables`` cover them in order.
    """

    rows: npt.NDArray[np.int64]
    sent: Array
    tables: tuple[Attended, ...]


@dataclass(frozen=True)
class StepTables:
    """What one step needs from this worker, planned once and used for every layer.

    Attributes:
        tables: for every piece of a request, what its query rows attend to; empty without query rows.
        further: and besides.
        slots: for the new tokens that arrive with requests.
        sent_slots: the same on the device.
        pulled_slots: for those of ``rows.pulled``.
        door: lane * ranks + rank, whose messages these are.
        appends: attention keeps the new tokens of requests.
        order: which chunks of other lanes the step waits for, and which wait for it.
    """

    plan: StepPlan
    rows: MessageRows
    pieces: tuple[Piece, ...]
    tables: tuple[tuple[Attended, ...], ...]
    further: tuple[tuple[Further, ...], ...]
    slots: npt.NDArray[np.int32]
    sent_slots: Array
    pulled_slots: npt.NDArray[np.int32]
    door: int
    appends: bool = False
    order: ChunkOrder = ALONE

    @functools.cached_property
    def is_served_at_once(self) -> bool:
        """True if a request is answered without a pause once it has arrived: its rows decode, over a segment each."""
        pauses = len(self.pieces) > 1 or any(self.further) or any(len(attended) > 1 for attended in self.tables)
        waits = self.rows.pulled or self.order.after
        return not pauses and not waits and all(len(one.tokens) == 1 for one in self.plan.sequences)
